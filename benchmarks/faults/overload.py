"""Many more requests than a server runs at once, sent together: who is answered, who is refused, what waiting costs."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.faults.client import WHOLE, HealthWatch, Stream, completion, opened, read_all, serve_once, watching
from benchmarks.faults.findings import Finding, tally
from benchmarks.faults.server import FaultServer, Limits

NUM_SEQS = 32
TIMES = 32
"""The ratio of requests sent to requests that run at once."""
MAX_TOKENS = 32
NUM_WORDS = 200
PATIENCE_S = 30.0
"""Seconds that a client waits for the next event before it gives up."""
LIMITS = Limits(num_seqs=NUM_SEQS)
SAMPLE_S = 0.1


async def measure(server: FaultServer) -> list[Finding]:
    """Send 32 times as many requests as run at once."""
    async with opened(server) as client:
        await read_all(client, _streams(server, NUM_SEQS, first=5000))  # what is allocated once is allocated
    before_mb, memory = server.memory_mb(), _Memory(server)
    streams = _streams(server, TIMES * NUM_SEQS, first=0)
    async with watching(HealthWatch(server, timeout_s=10.0)) as health, opened(server, PATIENCE_S) as client:
        sampling = asyncio.create_task(memory.sample())
        began_s = time.perf_counter()
        await read_all(client, streams)
        took_s = time.perf_counter() - began_s
        sampling.cancel()
    next_end, next_s = await serve_once(server, PATIENCE_S)
    findings = list(_findings(streams, took_s, health))
    grown_mb = memory.peak_mb - before_mb
    return [
        *findings,
        Finding("memory at the peak, more than before", grown_mb, "MB"),
        Finding("of that for each request", grown_mb * 1e3 / len(streams), "kB"),
        Finding("a new request right after", f"{next_end} in {next_s:.1f} s"),
    ]


def _streams(server: FaultServer, count: int, first: int) -> list[Stream]:
    return [Stream(completion(server, first + number, MAX_TOKENS, NUM_WORDS)) for number in range(count)]


class _Memory:
    """The most memory that the server had."""

    def __init__(self, server: FaultServer) -> None:
        self._server = server
        self.peak_mb = 0.0

    async def sample(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self._server.memory_mb())
            await asyncio.sleep(SAMPLE_S)


def _findings(streams: Sequence[Stream], took_s: float, health: HealthWatch) -> Iterator[Finding]:
    yield Finding(f"{len(streams)} requests", tally(stream.end or "" for stream in streams))
    refused = [stream for stream in streams if (stream.end or "").startswith("status")]
    if refused:
        told = Counter(stream.retry_after is not None for stream in refused)
        yield Finding("refused ones told when to come back", f"{told[True]} of {len(refused)}")
    answered = sorted(stream.ttft_s for stream in streams if stream.end == WHOLE and stream.times_s)
    if answered:
        yield Finding("time to first token, median", statistics.median(answered), "s")
        yield Finding("longest", answered[-1], "s")
        yield Finding("answered a second", len(answered) / took_s)
    yield Finding("longest answer of /health", health.longest_s, "s")
