"""The gateway alone: its streams with an engine that computes nothing, on one core of its own."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.server import Server, running_server
from benchmarks.streaming.client import Client, chat_request, completion_request, finish
from benchmarks.streaming.engine import CORES_VARIABLE
from sluice.gateway.checkpoint import find_checkpoint, model_name

LIGHT, FULL, HEAVY = 15_000.0, 30_000.0, 90_000.0
"""Tokens/s that the engine offers: few enough for an event each, twice as many, and more than a gateway can send one by
one."""
RUN_S = 6.0
"""A run is as long as the offered tokens last, and longer where the gateway is slower."""
WARM_STREAMS = 8
MEMORY_FROM = 512
"""Memory is divided by at least this many streams: with fewer, the noise of the server is larger."""
POLL_S = 0.05

THROUGHPUT_TARGET = Target(45_000.0, is_ceiling=False)
MEMORY_TARGET = Target(60.0)
UNITS = {
    "streamed output": "tokens/s",
    "events with text": "events/s",
    "gateway CPU": "us/token",
    "client CPU": "us/token",
    "TTFT p50": "ms",
    "ITL p50": "ms",
    "memory of an open stream": "kB",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Streams of one kind, and what the engine offers them together, in tokens/s."""

    streams: int
    offered: float
    path: str = "chat"

    @property
    def name(self) -> str:
        return f"{self.path}, {self.streams:,} streams, {self.offered:,.0f}/s offered"

    @property
    def tokens(self) -> int:
        """Tokens of each stream: a request's own cost shows in them as it does for clients."""
        return 512 if self.streams == 1 else 256

    @property
    def requests(self) -> int:
        return max(1, round(self.offered * RUN_S / self.tokens / self.streams)) * self.streams


ROWS = (
    Row(1, 1500.0),
    *(Row(streams, offered) for streams in (64, 512, 2000) for offered in (LIGHT, HEAVY)),
    Row(64, FULL),
    Row(64, LIGHT, "completions"),
    Row(64, HEAVY, "completions"),
)


def measure(num_repeats: int, folder: Path, only: str, report: ReportProgress) -> list[Figure]:
    """Measure each row whose name has `only` in it with a gateway of its own; the rows take turns in each repeat."""
    rows = [row for row in ROWS if only in row.name]
    if not rows:
        raise BenchmarkError(f"no row of this benchmark has {only!r} in its name")
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(num_repeats):
        for row in rows:
            values = _measure_row(row, folder)
            report(f"{row.name}: " + ", ".join(f"{name} {value:.5g}" for name, value in values.items()))
            for name, value in values.items():
                samples[name, row.name].append(value)
    return [Figure(name, row, UNITS[name], tuple(s), _target(name, row)) for (name, row), s in samples.items()]


def _target(name: str, row: str) -> Target | None:
    if name == "streamed output" and f"{HEAVY:,.0f}" in row:
        return THROUGHPUT_TARGET
    return MEMORY_TARGET if UNITS[name] == "kB" else None


def cores() -> tuple[Sequence[int], Sequence[int]]:
    """Return the core of the server and those of all else, which are the same where there is only one."""
    first, *others = sorted(os.sched_getaffinity(0))
    return (first,), others or (first,)


def joined(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


@contextmanager
def gateway_alone(log: Path, *, is_pinned: bool = False) -> Iterator[Server]:
    """Run a gateway whose engine computes nothing, on all cores or pinned to one that the engine leaves to it."""
    ours, others = cores()
    all_cores = joined(sorted({*ours, *others}))
    pinning = ("taskset", "-c", joined(ours)) if is_pinned else ()
    prefix = ("env", f"{CORES_VARIABLE}={joined(others) if is_pinned else all_cores}", *pinning)
    module = "benchmarks.streaming.serve"
    with running_server(find_checkpoint(None), log, module=module, prefix=prefix) as server:
        yield server


def _measure_row(row: Row, folder: Path) -> dict[str, float]:
    client = Client.build(folder, cores()[1])
    make = chat_request if row.path == "chat" else completion_request
    request = make(model_name(find_checkpoint(None)), row.tokens, seed=int(row.offered))
    with gateway_alone(folder / "streams.log", is_pinned=True) as server:
        port = urlsplit(server.url).port
        assert port is not None
        warm = min(WARM_STREAMS, row.streams)
        client.run(port, request, streams=warm, requests=4 * warm, tokens=row.tokens)
        base_mb, cpu_s = _gateway_mb(server), server.gateway_cpu_s()
        process = client.start(port, request, streams=row.streams, requests=row.requests, tokens=row.tokens)
        peak_mb = base_mb
        while process.poll() is None:
            peak_mb = max(peak_mb, _gateway_mb(server))
            time.sleep(POLL_S)
        load = finish(process)
        spent_us = (server.gateway_cpu_s() - cpu_s) * 1e6
    values = {
        "streamed output": load.tokens_per_s,
        "events with text": load.events * 1e6 / load.elapsed,
        "gateway CPU": spent_us / load.tokens,
        "client CPU": load.cpu / load.tokens,
        "TTFT p50": load.first_p50 / 1e3,
        "ITL p50": load.gap_p50 / 1e3,
    }
    if row.streams >= MEMORY_FROM:
        values["memory of an open stream"] = (peak_mb - base_mb) * 1e3 / row.streams
    return values


def _gateway_mb(server: Server) -> float:
    """Return the resident memory of the gateway process, in MB of 10^6 bytes."""
    return float(server.gateway.memory_info().rss / 1e6)
