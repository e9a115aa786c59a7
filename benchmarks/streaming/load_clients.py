"""`sluice load` beside AIPerf, NVIDIA's load generator, in turns against one server: do both measure the same?

The server is Sluice with an engine of steady times (steady_server.py), which takes little CPU: on the cores of a model
that computes, the client that needs more of them would make the server slower, and both would be right. Both clients
send /v1/completions of the same lengths, streamed, one after the other or evenly spaced: requests that all begin at one
moment would wait for each other in the client.
"""

import json
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.offline.environments import Environment, interpreter
from benchmarks.server import running_server
from benchmarks.streaming.steady_server import FIRST_S, MODULE, STEP_S
from sluice.gateway.checkpoint import find_checkpoint, model_name
from sluice.load.config import Arrival, LoadConfig, LoadTarget, RequestPace, TokenRange, Workload
from sluice.load.run import run_blocking
from sluice.load.workload import FittedWords, planned_requests

AIPERF = Environment("aiperf", "aiperf", "0.13.0")
LIMIT_S = 300.0
NUM_WARM = 2
IDLE_S = 2.0
"""Time before each turn, so that the server has nothing left of the last."""
AGREEMENT = Target(3.0)
UNITS = {"TTFT p50": "ms", "TPOT p50": "ms", "E2E p50": "ms", "output": "tokens/s"}
_AIPERF_NAMES = {
    "TTFT p50": ("time_to_first_token", "p50"),
    "TPOT p50": ("inter_token_latency", "p50"),
    "E2E p50": ("request_latency", "p50"),
    "output": ("output_token_throughput", "avg"),
}
"""The places of the figures in AIPerf's report. Its inter-token latency is the mean of a request, which is our TPOT."""
Samples = Mapping[str, Mapping[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Row:
    """A load."""

    prompt_tokens: int
    output_tokens: int
    num_requests: int
    rate: float | None = None
    """Requests a second, evenly spaced; None for one after the other."""

    @property
    def name(self) -> str:
        return "one after the other" if self.rate is None else f"{self.rate:g} requests/s"

    @property
    def pace(self) -> RequestPace:
        return RequestPace(
            concurrency=1 if self.rate is None else None,
            request_rate=self.rate,
            arrival=Arrival.CONSTANT,
            num_requests=self.num_requests,
            warmup=NUM_WARM,
        )

    def workload(self, checkpoint: Path, seed: int) -> Workload:
        prompt, output = (TokenRange(each, each) for each in (self.prompt_tokens, self.output_tokens))
        return Workload(prompt, output, seed=seed, tokenizer=checkpoint / "tokenizer.json")


ROWS = (Row(128, 64, 8), Row(128, 64, 96, 8.0))


def measure(num_repeats: int, folder: Path, only: str | None, report: ReportProgress) -> list[Figure]:
    """Measure with both, in an order that changes with each repeat."""
    python = interpreter(AIPERF, folder / "envs", report)
    checkpoint = find_checkpoint(None)
    figures: list[Figure] = []
    with running_server(checkpoint, folder / "load-clients.log", module=MODULE) as server:
        clients = {
            "sluice load": lambda row, seed: _with_ours(server.url, checkpoint, row, seed),
            "AIPerf": lambda row, seed: _with_aiperf(server.url, checkpoint, row, seed, python, folder / "aiperf"),
        }
        for row in (each for each in ROWS if only is None or only in each.name):
            samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in clients}
            for repeat in range(num_repeats):
                for place, name in list(enumerate(clients))[:: 1 if repeat % 2 == 0 else -1]:
                    time.sleep(IDLE_S)
                    found = clients[name](row, 2 * repeat + place + 1)
                    report(f"{row.name}, {name}: " + ", ".join(f"{each} {value:.4g}" for each, value in found.items()))
                    for each, value in found.items():
                        samples[name][each].append(value)
            figures += [*_figures(samples, row), *_differences(samples, row)]
    return figures


def _known(row: Row) -> dict[str, float]:
    """Return what there is to measure, without the gateway's own time."""
    e2e_s = FIRST_S + STEP_S * (row.output_tokens - 1)
    wall_s = row.num_requests * e2e_s if row.rate is None else (row.num_requests - 1) / row.rate + e2e_s
    found = (FIRST_S * 1e3, STEP_S * 1e3, e2e_s * 1e3, row.num_requests * row.output_tokens / wall_s)
    return dict(zip(UNITS, found, strict=True))


def _figures(samples: Samples, row: Row) -> Iterator[Figure]:
    for each, value in _known(row).items():
        yield Figure(each, f"the engine, {row.name}", UNITS[each], (value,))
    for name, found in samples.items():
        for each, values in found.items():
            yield Figure(each, f"{name}, {row.name}", UNITS[each], tuple(values))


def _differences(samples: Samples, row: Row) -> Iterator[Figure]:
    """Yield by how much the medians of both differ, relative to AIPerf's."""
    ours, theirs = samples.values()
    for each in UNITS:
        ratio = statistics.median(ours[each]) / statistics.median(theirs[each])
        yield Figure(f"{each}, difference", row.name, "%", (abs(ratio - 1) * 100,), AGREEMENT)


def _with_ours(url: str, checkpoint: Path, row: Row, seed: int) -> dict[str, float]:
    s = run_blocking(LoadConfig(LoadTarget(url), row.pace, row.workload(checkpoint, seed))).summary
    if s.num_failed or s.ttft_ms.p50 is None or s.tpot_ms.p50 is None or s.e2e_ms.p50 is None:
        raise BenchmarkError(f"{s.num_failed} requests of `sluice load` failed: {s.failures}")
    found = (s.ttft_ms.p50, s.tpot_ms.p50, s.e2e_ms.p50, s.output_tokens_per_s)
    return dict(zip(UNITS, found, strict=True))


def _with_aiperf(url: str, checkpoint: Path, row: Row, seed: int, python: Path, folder: Path) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = _write_prompts(checkpoint, row, seed, folder / "prompts.jsonl")
    words = ("profile", "-m", model_name(checkpoint), "-u", url, "--endpoint-type", "completions", "--streaming")
    dataset = ("--input-file", prompts, "--custom-dataset-type", "single_turn", "--tokenizer", checkpoint.resolve())
    fields = {"max_tokens": row.output_tokens, "ignore_eos": "true", "temperature": 0}
    extra = [word for name, value in fields.items() for word in ("--extra-inputs", f"{name}:{value}")]
    spacing = ("--request-rate", row.rate, "--arrival-pattern", "constant")
    level = ("--concurrency", 1) if row.rate is None else spacing
    pace = (*level, "--request-count", row.num_requests, "--warmup-request-count", NUM_WARM)
    output = ("--artifact-dir", folder.resolve(), "--ui", "none", "--use-server-token-count")
    # One worker suffices for these loads: more would take the cores from each other.
    small = ("--workers-max", 1, "--record-processors", 1, "--no-server-metrics", "--no-gpu-telemetry")
    command = [str(python.with_name("aiperf")), *map(str, (*words, *dataset, *extra, *pace, *output, *small))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
    file = next(folder.rglob("profile_export_aiperf.json"), None)
    if done.returncode or file is None:
        raise BenchmarkError(f"AIPerf failed: {' '.join((done.stderr or done.stdout).strip().splitlines()[-3:])}")
    document = json.loads(file.read_bytes())
    num_served = document["request_count"]["avg"]
    if num_served != row.num_requests:
        raise BenchmarkError(f"AIPerf was served {num_served} of {row.num_requests} requests")
    return {each: float(document[metric][part]) for each, (metric, part) in _AIPERF_NAMES.items()}


def _write_prompts(checkpoint: Path, row: Row, seed: int, file: Path) -> Path:
    """Write prompts that are as long as ours, enough for the warm-up and the run."""
    workload = row.workload(checkpoint, seed)
    prompts = planned_requests(workload, FittedWords(checkpoint / "tokenizer.json"))
    lines = [json.dumps({"text": planned.prompt}) for planned in islice(prompts, row.num_requests + NUM_WARM)]
    file.write_text("\n".join(lines) + "\n")
    return file.resolve()
