"""The server as its users see it: launch, memory, latency, throughput, and what the gateway costs a token."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, Target
from benchmarks.models import model_s
from benchmarks.server import Server, running_server
from benchmarks.workloads import CROWD, FIRST, SERVED, SINGLE, drive, milliseconds
from gateway.checkpoint import find_checkpoint, model_name

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


def measure(num_repeats: int, folder: Path, bundled: Path | None) -> list[Figure]:
    """The bundled model (or the checkpoint `bundled` in its place) and S.

    Each repeat launches a server for each model in turn, so that a noisy hour hits both alike.
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
