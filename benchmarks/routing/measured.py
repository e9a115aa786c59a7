"""The simulation beside a server: costs calibrated on it, a load measured on it, and the same load simulated.

Both are measured again in each repeat, one right after the other: a machine that is busy with something else is slower
for a while, and the simulation can only know how fast it was during the calibration. So the load is simulated a second
time with all costs scaled by one factor, by which the mean ITL is the measured one: what is left is the model's error.
"""

from collections import defaultdict
from pathlib import Path

import msgspec

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.server import running_server
from benchmarks.serving import drive, milliseconds
from engine.simulation.fleet import FleetConfig, simulate
from engine.simulation.profile import ReplicaProfile, StepCosts, read_profile
from engine.simulation.summary import FleetSummary, summarize
from engine.simulation.traces import TracedRequest, read_trace
from gateway.checkpoint import find_checkpoint
from load import report as load_report
from load.calibrate import calibrate_blocking
from load.config import LoadConfig, LoadTarget, RequestPace, TokenRange, Workload
from load.run import Run
from load.summary import Summary

LONGEST_PROMPT, CROWD = 512, 16
PROMPT_TOKENS, OUTPUT_TOKENS = TokenRange(50, 300), TokenRange(32, 96)
RUN_S, LEAST_REQUESTS, MOST_REQUESTS = 30.0, 60, 600
USUAL_CROWD = 6
"""Requests in flight that the load aims at."""
WITHIN = 15.0
TARGET = Target(WITHIN)
VOCABULARY, MAX_MODEL_LEN = 4096, 1024
NUM_HALVINGS = 12
"""The search for the machine's speed ends when the ratio of its bounds is within a thousandth of 1."""


def measure(num_repeats: int, folder: Path, model: Path | None, report: ReportProgress) -> list[Figure]:
    """Measure the bundled model, or the checkpoint `model`, with one engine."""
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    with running_server(model or find_checkpoint(None), folder / "serve-routing.log") as server:
        for repeat in range(num_repeats):
            profile = _calibrated(server.url, folder, report)
            rate = USUAL_CROWD / _service_s(profile)
            count = int(min(max(RUN_S * rate, LEAST_REQUESTS), MOST_REQUESTS))
            report(f"{count} requests, {rate:.2f} a second")
            workload = Workload(PROMPT_TOKENS, OUTPUT_TOKENS, seed=repeat)
            run = drive(server.url, None, VOCABULARY, (workload, RequestPace(request_rate=rate, num_requests=count)))
            requests = _requests_of(run, folder)
            speed, scaled = _at_equal_speed(requests, profile, milliseconds(run.summary.itl_ms.mean) / 1e3)
            samples["speed of the machine, calibration / run", "x"].append(speed)
            for kind, simulated in (("", _simulated(requests, profile)), (" at the run's speed", scaled)):
                for name, unit, was, is_now in _pairs(run.summary, simulated):
                    report(f"{name}{kind}: measured {was:,.4g}, simulated {is_now:,.4g} {unit}")
                    if not kind:
                        samples[f"{name}, measured", unit].append(was)
                    samples[f"{name}{kind}, simulated", unit].append(is_now)
                    samples[f"{name}{kind}, off by", "%"].append(100 * abs(is_now - was) / was)
    return [
        Figure(name, "one engine", unit, tuple(values), TARGET if name.endswith("off by") else None)
        for (name, unit), values in samples.items()
    ]


def _calibrated(url: str, folder: Path, report: ReportProgress) -> ReplicaProfile:
    config = LoadConfig(LoadTarget(url), RequestPace(concurrency=1, num_requests=1), Workload())
    found = calibrate_blocking(config, LONGEST_PROMPT, CROWD, lambda line: None)
    report(f"calibrated: off by {found.median_error:.1%} in the median, {found.worst_error:.1%} at most")
    path = folder / "costs.json"
    path.write_bytes(found.to_json())
    return read_profile(path)


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


def _simulated(requests: list[TracedRequest], profile: ReplicaProfile) -> FleetSummary:
    limits = msgspec.structs.replace(profile, max_model_len=MAX_MODEL_LEN)
    return summarize(simulate(requests, FleetConfig(limits, 1)))


def _at_equal_speed(requests: list[TracedRequest], profile: ReplicaProfile, itl_s: float) -> tuple[float, FleetSummary]:
    """Return the factor on all costs by which the mean ITL is `itl_s`, and the figures with it."""
    low, high = 0.1, 10.0
    for _ in range(NUM_HALVINGS):
        factor = (low * high) ** 0.5
        costs = {name: factor * getattr(profile.costs, name) for name in profile.costs.__struct_fields__}
        faster = msgspec.structs.replace(profile, costs=StepCosts(**costs), request_s=factor * profile.request_s)
        summary = _simulated(requests, faster)
        low, high = (factor, high) if (summary.itl_s.mean or 0.0) < itl_s else (low, factor)
    return factor, summary


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
