"""SIGSTOP of the engine's process: it neither computes nor ends. Does anybody notice?"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil

from benchmarks.faults.client import (
    HealthWatch,
    Stream,
    completion,
    opened,
    read_all,
    serve_once,
    served_again,
    watching,
)
from benchmarks.faults.findings import Finding, tally
from benchmarks.faults.server import FaultServer, Limits

NUM_STREAMS = 8
MAX_TOKENS = 900
LIMITS = Limits()
STOPPED_S = 40.0
NEW_AFTER_S = 1.0
PATIENCE_S = 70.0
SERVED_LIMIT_S = 40.0


async def measure(server: FaultServer) -> list[Finding]:
    """Stop the engine under 8 streams, send a new request, and let it go on after 40 s."""
    streams = [Stream(completion(server, number, MAX_TOKENS)) for number in range(NUM_STREAMS)]
    async with opened(server, PATIENCE_S) as client, watching(HealthWatch(server)) as health:
        reading = asyncio.create_task(read_all(client, streams))
        await asyncio.gather(*(stream.is_under_way.wait() for stream in streams))
        stopped_s = time.perf_counter()
        stopped = server.engines()
        for engine in stopped:
            engine.suspend()
        await asyncio.sleep(NEW_AFTER_S)
        asking = asyncio.create_task(serve_once(server, STOPPED_S - NEW_AFTER_S))
        await asyncio.sleep(STOPPED_S - NEW_AFTER_S)
        course, told_s = health.course(stopped_s), health.told_after_s(stopped_s)
        ended = tally(stream.end or "still waiting" for stream in streams)
        for engine in stopped:
            with suppress(psutil.NoSuchProcess):
                engine.resume()
        is_served = await served_again(server, SERVED_LIMIT_S)
        await reading
    new = await asking
    return list(_findings(streams, ended, course, told_s, new, is_served))


def _findings(
    streams: Sequence[Stream], ended: str, course: str, told_s: float | None, new: tuple[str, float], is_served: bool
) -> Iterator[Finding]:
    yield Finding("/health says so after", "never" if told_s is None else told_s, "s" * (told_s is not None))
    yield Finding("/health meanwhile", course)
    yield Finding(f"{NUM_STREAMS} streams after {STOPPED_S:.0f} s", ended)
    yield Finding(f"a request {NEW_AFTER_S:.0f} s after the stop", f"{new[0]} in {new[1]:.1f} s")
    yield Finding("streams in the end, the engine having gone on", tally(stream.end or "" for stream in streams))
    yield Finding("serves in the end", "yes" if is_served else "no")
