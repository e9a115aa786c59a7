"""Clients that leave in the middle of long streams, all at once: how long the server computes for nobody."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.faults.client import Stream, completion, opened, serve_once
from benchmarks.faults.findings import Finding, tally
from benchmarks.faults.server import FaultServer, Limits
from benchmarks.figures import BenchmarkError

NUM_CLIENTS = 32
MAX_TOKENS = 900
LIMITS = Limits(num_seqs=NUM_CLIENTS)
LIMIT_S = 60.0
METRIC_S, CPU_S = 0.02, 0.25
IDLE_CORES = 0.1
"""Cores in use under which a server counts as idle."""


@dataclass(slots=True)
class _Idle:
    """Seconds from the clients' leaving until the server was first seen idle; None for never."""

    by_metric_s: float | None = None
    by_cpu_s: float | None = None


async def measure(server: FaultServer) -> list[Finding]:
    """Start 32 clients, disconnect them, and watch the server until it is idle."""
    streams = [Stream(completion(server, number, MAX_TOKENS)) for number in range(NUM_CLIENTS)]
    async with opened(server) as client:
        tasks = [asyncio.create_task(stream.read(client)) for stream in streams]
        await asyncio.gather(*(stream.is_under_way.wait() for stream in streams))
        if any(stream.end for stream in streams):
            ended = tally(stream.end for stream in streams if stream.end)
            raise BenchmarkError(f"of {NUM_CLIENTS} streams ended before their clients left: {ended}")
        before = server.metric(server.counters.generated)
        for task in tasks:
            task.cancel()
        left_s = time.perf_counter()
        await asyncio.gather(*tasks, return_exceptions=True)
    idle = _Idle()
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(_watch_metric(server, idle, left_s), _watch_cpu(server, idle, left_s))
    after = server.metric(server.counters.generated)
    return [*_findings(server, idle, before, after), Finding("a new request then", (await serve_once(server, 30.0))[0])]


async def _watch_metric(server: FaultServer, idle: _Idle, left_s: float) -> None:
    while server.counters.running is not None:
        if (await asyncio.to_thread(server.metric, server.counters.running)) == 0:
            idle.by_metric_s = time.perf_counter() - left_s
            return
        await asyncio.sleep(METRIC_S)


async def _watch_cpu(server: FaultServer, idle: _Idle, left_s: float) -> None:
    used, at = server.cpu_s(), time.perf_counter()
    while True:
        await asyncio.sleep(CPU_S)
        now_used, now = server.cpu_s(), time.perf_counter()
        if (now_used - used) / (now - at) < IDLE_CORES:
            idle.by_cpu_s = at - left_s
            return
        used, at = now_used, now


def _findings(server: FaultServer, idle: _Idle, before: float | None, after: float | None) -> Iterator[Finding]:
    yield _seconds("until nothing runs, by its metrics", idle.by_metric_s, server.counters.running is not None)
    yield _seconds("until its CPU is idle", idle.by_cpu_s, is_known=True)
    if before is None or after is None:
        yield Finding("tokens computed for nobody", "not counted")
    else:
        yield Finding("tokens computed for nobody", after - before)


def _seconds(measure: str, value: float | None, is_known: bool) -> Finding:
    if not is_known:
        return Finding(measure, "no such metric")
    return Finding(measure, f"not within {LIMIT_S:.0f} s") if value is None else Finding(measure, value, "s")
