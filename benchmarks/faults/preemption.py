"""A KV cache too small for what comes: are accepted requests computed again, and do all of them finish?"""

import time
from collections.abc import Iterator, Sequence

from benchmarks.faults.client import WHOLE, Stream, completion, opened, read_all
from benchmarks.faults.findings import Finding, tally
from benchmarks.faults.server import FaultServer, Limits

NUM_REQUESTS = 32
MAX_TOKENS = 192
NUM_WORDS = 48
LIMITS = Limits(num_seqs=NUM_REQUESTS, cache_tokens=2048, max_model_len=512)
PAUSE_S = 1.0
"""A pause that a reader sees."""


async def measure(server: FaultServer) -> list[Finding]:
    """Send 32 requests at once to a cache that holds about eight of them."""
    names = server.counters
    counted = (names.preemptions, names.recomputed, names.generated)
    before = [server.metric(name) for name in counted]
    streams = [Stream(completion(server, number, MAX_TOKENS, NUM_WORDS)) for number in range(NUM_REQUESTS)]
    async with opened(server) as client:
        began_s = time.perf_counter()
        await read_all(client, streams)
        took_s = time.perf_counter() - began_s
    after = [server.metric(name) for name in counted]
    pairs = zip(before, after, strict=True)
    return list(_findings(streams, took_s, [None if x is None or y is None else y - x for x, y in pairs]))


def _findings(streams: Sequence[Stream], took_s: float, counts: Sequence[float | None]) -> Iterator[Finding]:
    preemptions, recomputed, generated = counts
    yield Finding(f"{NUM_REQUESTS} requests", tally(stream.end or "" for stream in streams))
    yield Finding("preemptions", "not counted" if preemptions is None else preemptions)
    yield Finding("tokens computed again", _share(recomputed, generated, preemptions))
    begun = [stream for stream in streams if stream.times_s]
    paused = sum(stream.longest_pause_s() > PAUSE_S for stream in begun)
    yield Finding(f"streams with a pause of more than {PAUSE_S:.0f} s", f"{paused} of {len(begun)}")
    yield Finding("longest pause of a stream", max((stream.longest_pause_s() for stream in begun), default=0.0), "s")
    whole = sum(stream.end == WHOLE for stream in streams)
    yield Finding("whole answers a second", whole / took_s)
    details = {stream.detail[:100] for stream in streams if stream.end != WHOLE and stream.detail}
    if details:
        yield Finding("what the others read", sorted(details)[0])


def _share(recomputed: float | None, generated: float | None, preemptions: float | None) -> str:
    if recomputed is None:
        return "0" if preemptions == 0 else "not counted"
    return f"{recomputed:,.0f}" + (f", {100 * recomputed / generated:.0f} % of those generated" if generated else "")
