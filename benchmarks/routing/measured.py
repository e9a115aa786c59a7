"""The simulation beside a server, with one engine and with two: costs calibrated on it, a load measured on it, and the
same load simulated.

A calibration sends its requests in groups. Under a load whose requests come at random, the gateway and the client take
more of the engine's cores, and a machine may be slower for a while. So a first run against one engine at another rate
scales the costs, as `sluice simulate --measured` does. Two engines on the same cores slow each other down: a run
against both says by how much, as `--measured-together` does. The last run is simulated with the costs of both kinds.
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.server import Server, running_server
from benchmarks.serving import drive, milliseconds
from sluice.engine.simulation.fleet import FleetConfig, simulate
from sluice.engine.simulation.profile import ReplicaProfile, read_profile
from sluice.engine.simulation.scaling import fit_slowdown, scale_costs
from sluice.engine.simulation.summary import FleetSummary, summarize
from sluice.engine.simulation.traces import TracedRequest, read_trace
from sluice.gateway.checkpoint import find_checkpoint
from sluice.load import report as load_report
from sluice.load.calibrate import calibrate_blocking
from sluice.load.config import LoadConfig, LoadTarget, RequestPace, TokenRange, Workload
from sluice.load.run import Run
from sluice.load.summary import Summary

LONGEST_PROMPT, CROWD = 512, 16
PROMPT_TOKENS, OUTPUT_TOKENS = TokenRange(50, 300), TokenRange(32, 96)
RUN_S, LEAST_REQUESTS, MOST_REQUESTS = 30.0, 60, 600
USUAL_CROWD = 6
"""Requests in flight that the load aims at, by the costs as calibrated."""
TARGET = Target(15.0)
VOCABULARY, MAX_MODEL_LEN = 4096, 1024


class Subject(NamedTuple):
    """A server to measure: so many engines, with these options. `shares` are the rates of the run that scales and of
    the one that is simulated, as parts of the one with USUAL_CROWD in flight in each engine. Two engines have no cores
    of their own: gateway and client use the same two."""

    name: str
    num_replicas: int
    options: tuple[str, ...]
    shares: tuple[float, float]


SUBJECTS = (
    Subject("one engine", 1, (), (0.5, 0.7)),
    Subject("two engines, a thread each", 2, ("--num-threads=1",), (0.2, 0.27)),
)


def measure(num_repeats: int, folder: Path, model: Path | None, report: ReportProgress) -> list[Figure]:
    """Measure the bundled model, or the checkpoint `model`. The machine has two cores for engines and all else."""
    checkpoint = model or find_checkpoint(None)
    figures: list[Figure] = []
    for subject in SUBJECTS:
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for repeat in range(num_repeats):
            with running_server(checkpoint, folder / "serve-routing.log", *subject.options) as server:
                profile = _calibrated(server.url, folder, report)
                alone = _run(server, subject.shares[0] * USUAL_CROWD / _service_s(profile), 3 * repeat, report)
                if subject.num_replicas == 1:
                    _measure_server(server, subject, profile, alone, repeat, folder, samples, report)
                    continue
            with running_server(
                checkpoint, folder / "serve-routing.log", f"--replicas={subject.num_replicas}", *subject.options
            ) as server:
                _measure_server(server, subject, profile, alone, repeat, folder, samples, report)
        figures += [
            Figure(name, subject.name, unit, tuple(values), TARGET if name.endswith("scaled, off by") else None)
            for (name, unit), values in samples.items()
        ]
    return figures


def _measure_server(
    server: Server,
    subject: Subject,
    profile: ReplicaProfile,
    alone: Run,
    repeat: int,
    folder: Path,
    samples: dict[tuple[str, str], list[float]],
    report: ReportProgress,
) -> None:
    fleet = FleetConfig(msgspec.structs.replace(profile, max_model_len=MAX_MODEL_LEN), subject.num_replicas)
    whole_rate = subject.num_replicas * USUAL_CROWD / _service_s(profile)
    factor, scaled = scale_costs(_requests_of(alone, folder), fleet._replace(num_replicas=1), _itl_s(alone))
    samples["costs under load / as calibrated", "x"].append(factor)
    if subject.num_replicas > 1:
        report("once to warm up")  # a new server's first steps of each shape take long
        _run(server, subject.shares[0] * whole_rate, 3 * repeat + 1, report)
        first = _run(server, subject.shares[0] * whole_rate, 3 * repeat + 1, report)
        scaled = fit_slowdown(_requests_of(first, folder), fleet._replace(profile=scaled), _itl_s(first))
        samples["a step beside another / alone", "x"].append(1.0 + scaled.slowdown)
    second = _run(server, subject.shares[1] * whole_rate, 3 * repeat + 2, report)
    requests = _requests_of(second, folder)
    for kind, config in (("calibrated", fleet), ("scaled", fleet._replace(profile=scaled))):
        for name, unit, was, is_now in _pairs(second.summary, summarize(simulate(requests, config))):
            report(f"{subject.name}, {name}, {kind}: measured {was:,.4g}, simulated {is_now:,.4g} {unit}")
            samples[f"{name}, {kind}, off by", "%"].append(100 * abs(is_now - was) / was)
            if kind == "scaled":
                samples[f"{name}, measured", unit].append(was)
                samples[f"{name}, simulated", unit].append(is_now)


def _run(server: Server, rate: float, seed: int, report: ReportProgress) -> Run:
    count = int(min(max(RUN_S * rate, LEAST_REQUESTS), MOST_REQUESTS))
    report(f"{count} requests, {rate:.2f} a second")
    workload = Workload(PROMPT_TOKENS, OUTPUT_TOKENS, seed=seed)
    return drive(server.url, None, VOCABULARY, (workload, RequestPace(request_rate=rate, num_requests=count)))


def _calibrated(url: str, folder: Path, report: ReportProgress) -> ReplicaProfile:
    config = LoadConfig(LoadTarget(url), RequestPace(concurrency=1, num_requests=1), Workload())
    found = calibrate_blocking(config, LONGEST_PROMPT, CROWD, lambda line: None)
    report(f"calibrated: off by {found.median_error:.1%} in the median, {found.worst_error:.1%} at most")
    path = folder / "costs.json"
    path.write_bytes(found.to_json())
    return read_profile(path)


def _itl_s(run: Run) -> float:
    return milliseconds(run.summary.itl_ms.mean) / 1e3


def _service_s(profile: ReplicaProfile) -> float:
    """Return what a request of the load takes beside USUAL_CROWD - 1 others."""
    costs = profile.costs
    num_prompt = (PROMPT_TOKENS.low + PROMPT_TOKENS.high) // 2
    num_output = (OUTPUT_TOKENS.low + OUTPUT_TOKENS.high) // 2
    step_s = costs.seconds(0, USUAL_CROWD, USUAL_CROWD * (num_prompt + num_output // 2), 0)
    return USUAL_CROWD * costs.seconds(num_prompt, 0, 0, 0) + num_output * step_s


def _requests_of(run: Run, folder: Path) -> list[TracedRequest]:
    path = folder / "routing-run.json"
    path.write_bytes(load_report.to_json(run, []))
    return read_trace(path)


def _pairs(measured: Summary, simulated: FleetSummary) -> list[tuple[str, str, float, float]]:
    """Return name, unit, the measured and the simulated value of each figure."""

    def both(name: str, was: float | None, is_now: float | None) -> tuple[str, str, float, float]:
        return name, "ms", milliseconds(was), milliseconds(is_now) * 1e3

    return [
        ("output", "tokens/s", measured.output_tokens_per_s, simulated.output_tokens_per_s),
        both("TTFT p50", measured.ttft_ms.p50, simulated.ttft_s.p50),
        both("TTFT mean", measured.ttft_ms.mean, simulated.ttft_s.mean),
        both("ITL mean", measured.itl_ms.mean, simulated.itl_s.mean),
        both("E2E p50", measured.e2e_ms.p50, simulated.e2e_s.p50),
        both("E2E mean", measured.e2e_ms.mean, simulated.e2e_s.mean),
    ]
