"""Startup: from the start of the process to the first token of an answer."""

import time
from collections.abc import Iterator

from benchmarks.faults.client import Stream, completion, opened
from benchmarks.faults.findings import Finding
from benchmarks.faults.server import FaultServer, Limits

LIMITS = Limits()


async def measure(server: FaultServer) -> list[Finding]:
    """Ask the server for a token as soon as it is ready."""
    stream = Stream(completion(server, 0, 8))
    async with opened(server) as client:
        await stream.read(client)
    return list(_findings(server, stream, time.perf_counter()))


def _findings(server: FaultServer, stream: Stream, now_s: float) -> Iterator[Finding]:
    yield Finding("launch to /health 200", server.ready_s - server.launched_s, "s")
    if stream.times_s:
        yield Finding("launch to the first token", stream.times_s[0] - server.launched_s, "s")
    else:
        yield Finding("launch to the first token", f"none: {stream.end}")
    yield Finding("memory then, all processes", server.memory_mb(), "MB")
