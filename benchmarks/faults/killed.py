"""`kill -9` of the engine's process under streams."""

import asyncio
import time
from collections.abc import Iterator, Sequence

from benchmarks.faults.client import WHOLE, HealthWatch, Stream, completion, opened, read_all, served_again, watching
from benchmarks.faults.findings import Finding, tally
from benchmarks.faults.server import FaultServer, Limits
from benchmarks.figures import BenchmarkError

NUM_STREAMS = 16
MAX_TOKENS = 600
LIMITS = Limits()
PATIENCE_S = 20.0
SERVED_LIMIT_S = 60.0


async def measure(server: FaultServer) -> list[Finding]:
    """Read 16 streams undisturbed, then the same with a kill in their midst."""
    undisturbed, streams = (
        [Stream(completion(server, number, MAX_TOKENS)) for number in range(NUM_STREAMS)] for _ in range(2)
    )
    async with opened(server, PATIENCE_S) as client:
        await read_all(client, undisturbed)
        if not any(stream.end == WHOLE for stream in undisturbed):
            raise BenchmarkError(f"undisturbed streams ended so: {tally(stream.end or '' for stream in undisturbed)}")
        async with watching(HealthWatch(server)) as health:
            reading = asyncio.create_task(read_all(client, streams))
            await asyncio.gather(*(stream.is_under_way.wait() for stream in streams))
            killed_s = time.perf_counter()
            for engine in server.engines():
                engine.kill()
            is_served = await served_again(server, SERVED_LIMIT_S)
            served_s = time.perf_counter() - killed_s
            await reading
            await asyncio.sleep(1.0)
    again = Finding("a new request is served again after", served_s if is_served else _never(server), "s" * is_served)
    return [*_findings(undisturbed, streams, killed_s), again, Finding("/health", health.course(killed_s))]


def _never(server: FaultServer) -> str:
    if server.exit_code is not None:
        return f"never: the server ended (exit code {server.exit_code})"
    return f"not within {SERVED_LIMIT_S:.0f} s"


def _findings(undisturbed: Sequence[Stream], streams: Sequence[Stream], killed_s: float) -> Iterator[Finding]:
    yield Finding(f"{NUM_STREAMS} streams", tally(stream.end or "" for stream in streams))
    same = [before.text == now.text for before, now in zip(undisturbed, streams, strict=True)]
    yield Finding("with the text of an undisturbed run", f"{sum(same)} of {NUM_STREAMS}")
    later = [
        stream.longest_pause_s(killed_s) for stream in streams if stream.times_s and stream.times_s[-1] > killed_s + 0.5
    ]
    if later:
        yield Finding("longest pause of one that went on", max(later), "s")
    details = {stream.detail[:100] for stream in streams if stream.detail and stream.end != WHOLE}
    if details:
        yield Finding("what their clients read", "; ".join(sorted(details)[:2]))
