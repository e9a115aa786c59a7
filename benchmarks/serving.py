"""A server under load by `sluice load`'s own code: launch, memory, latency, throughput, gateway CPU per token."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.models import model_s
from benchmarks.server import Server, running_server
from sluice.gateway.checkpoint import find_checkpoint, model_name
from sluice.load.config import LoadConfig, LoadTarget, RequestPace, TokenRange, Workload
from sluice.load.run import Run, run_blocking

UNITS_AND_TARGETS = {
    "launch to first token": ("s", Target(3.0)),
    "memory, RSS of all processes": ("MB", Target(700.0)),
    "memory, PSS of all processes": ("MB", None),
    "single stream TTFT p50": ("ms", None),
    "single stream ITL p50": ("ms", Target(2.0)),
    "served output": ("tokens/s", Target(3500.0, is_ceiling=False)),
    "served TTFT p50": ("ms", None),
    "served ITL p50": ("ms", None),
    "served ITL p99": ("ms", None),
    "64 streams output": ("tokens/s", None),
    "gateway CPU at 64 streams": ("us/token", Target(30.0)),
    "client CPU at 64 streams": ("us/token", None),
}
SINGLE = (Workload(TokenRange(128, 128), TokenRange(128, 128)), RequestPace(concurrency=1, num_requests=6, warmup=1))
"""A stream of 128 prompt tokens and 128 output tokens."""
SERVED = (Workload(TokenRange(32, 256), TokenRange(64, 192)), RequestPace(concurrency=32, num_requests=64, warmup=4))
"""64 requests, 32 at a time."""
CROWD = (Workload(TokenRange(32, 32), TokenRange(128, 128)), RequestPace(concurrency=64, num_requests=192, warmup=4))
"""64 streams at all times, long enough for the kernel's coarse accounting of CPU time."""
FIRST = (Workload(TokenRange(8, 8), TokenRange(1, 1)), RequestPace(concurrency=1, num_requests=1))
"""A request of one token, for the time of the first token after launch."""


def measure(num_repeats: int, folder: Path, bundled: Path | None) -> list[Figure]:
    """Measure the bundled model (or the checkpoint `bundled` in its place) and model S.

    Each repeat launches a server for each model in turn, so that noise of the machine affects both alike.
    """
    chat_model = bundled or find_checkpoint(None)
    models = {model_name(chat_model): chat_model, "S": model_s(folder / "models", chat_model)}
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        for model, checkpoint in models.items():
            with running_server(checkpoint, folder / f"serve-{model}-{repeat}.log") as server:
                for name, value in _measure_server(server, _vocab_size(checkpoint)):
                    samples[name, model].append(value)
    return [
        Figure(name, model, unit, tuple(samples[name, model]), target)
        for model in models
        for name, (unit, target) in UNITS_AND_TARGETS.items()
    ]


def measure_peer(url: str, model: str | None, vocab_size: int, num_repeats: int) -> list[Figure]:
    """Measure another OpenAI-compatible server, which is already running, by the same workloads."""
    single = [drive(url, model, vocab_size, SINGLE).summary for _ in range(num_repeats)]
    served = [drive(url, model, vocab_size, SERVED).summary for _ in range(num_repeats)]
    columns = {
        ("single stream TTFT p50", "ms"): [milliseconds(run.ttft_ms.p50) for run in single],
        ("single stream ITL p50", "ms"): [milliseconds(run.itl_ms.p50) for run in single],
        ("served output", "tokens/s"): [run.output_tokens_per_s for run in served],
        ("served TTFT p50", "ms"): [milliseconds(run.ttft_ms.p50) for run in served],
        ("served ITL p50", "ms"): [milliseconds(run.itl_ms.p50) for run in served],
        ("served ITL p99", "ms"): [milliseconds(run.itl_ms.p99) for run in served],
    }
    return [Figure(name, url, unit, tuple(samples)) for (name, unit), samples in columns.items()]


def _vocab_size(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_bytes())["vocab_size"])


def _measure_server(server: Server, vocab_size: int) -> Iterator[tuple[str, float]]:
    first = drive(server.url, None, vocab_size, FIRST)
    yield "launch to first token", first.results[0].event_times_s[0] - server.launched_s
    single = drive(server.url, None, vocab_size, SINGLE).summary
    yield "single stream TTFT p50", milliseconds(single.ttft_ms.p50)
    yield "single stream ITL p50", milliseconds(single.itl_ms.p50)
    served = drive(server.url, None, vocab_size, SERVED).summary
    yield "served output", served.output_tokens_per_s
    yield "served TTFT p50", milliseconds(served.ttft_ms.p50)
    yield "served ITL p50", milliseconds(served.itl_ms.p50)
    yield "served ITL p99", milliseconds(served.itl_ms.p99)
    yield from _measure_crowd(server, vocab_size)
    memory = server.memory()
    yield "memory, RSS of all processes", memory.rss_mb
    yield "memory, PSS of all processes", memory.pss_mb


def _measure_crowd(server: Server, vocab_size: int) -> Iterator[tuple[str, float]]:
    before_s = server.gateway_cpu_s()
    crowd = drive(server.url, None, vocab_size, CROWD)
    gateway_s = server.gateway_cpu_s() - before_s
    warmup_tokens = CROWD[1].warmup * CROWD[0].output_tokens.high
    yield "64 streams output", crowd.summary.output_tokens_per_s
    yield "gateway CPU at 64 streams", gateway_s * 1e6 / (crowd.summary.output_tokens + warmup_tokens)
    yield "client CPU at 64 streams", crowd.client_cpu_s * 1e6 / crowd.summary.output_tokens


def drive(url: str, model: str | None, vocab_size: int, workload_and_pace: tuple[Workload, RequestPace]) -> Run:
    """Run a workload against /v1/completions, with prompts of random ids below `vocab_size`.

    Raises `BenchmarkError` where a request failed: the figures of such a run mean nothing.
    """
    workload, pace = workload_and_pace
    exact = Workload(workload.prompt_tokens, workload.output_tokens, vocab_size=vocab_size)
    run = run_blocking(LoadConfig(LoadTarget(url, model=model), pace, exact))
    if run.summary.num_failed or run.was_interrupted:
        label, failure = next(iter(run.summary.failures.items()), ("interrupted", None))
        raise BenchmarkError(f"{run.summary.num_failed} requests failed: {label}: {failure and failure.example}")
    return run


def milliseconds(value: float | None) -> float:
    """Return a percentile, which exists where every request was served."""
    if value is None:
        raise BenchmarkError("the streams brought too few token events to time")
    return value
