"""TensorRT-LLM's iteration statistics under our names. Their fields differ by version and backend, and all of them may
be null or missing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sluice.engine.delegated.interface import Iteration
from sluice.engine.statistics import IterationStats

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""How long a stream of statistics or events waits before it ends; while something runs, it is read again."""
POLL_S = 0.25
"""Time to the next reading after a silence. While no request is submitted the source may be at its end each time."""
RETRY_S = 10.0
"""Time to the next reading after the source raised."""

_TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"
_TOP = {
    "num_active": "numActiveRequests",
    "max_active": "maxNumActiveRequests",
    "num_queued": "numQueuedRequests",
    "gpu_memory_bytes": "gpuMemUsage",
    "cpu_memory_bytes": "cpuMemUsage",
    "pinned_memory_bytes": "pinnedMemUsage",
}
_KV_CACHE = {
    "max_blocks": "maxNumBlocks",
    "free_blocks": "freeNumBlocks",
    "used_blocks": "usedNumBlocks",
    "tokens_per_block": "tokensPerBlock",
    "reused_blocks": "reusedBlocks",
    "missed_blocks": "missedBlocks",
    "cache_hit_rate": "cacheHitRate",
}
_BATCH = {
    "num_scheduled": "numScheduledRequests",
    "num_context": "numContextRequests",
    "num_generation": "numGenRequests",
    "num_paused": "numPausedRequests",
    "context_tokens": "numCtxTokens",
    "micro_batch_id": "microBatchId",
}

Source = Callable[[float], AsyncIterator[dict[str, Any]]]
"""Returns statistics or events as they come, which end after a silence of so many seconds."""


def _opened(source: Source) -> AsyncIterator[dict[str, Any]]:
    """Return what `source` has, the library's one object for all calls, open again. A silence ends it for good until
    the next request: without this a long step of the only request would look like a hang, since nothing that follows
    would be told."""
    stream = source(TIMEOUT_S)
    reopen = getattr(stream, "mark_undone", None)
    if reopen is not None:
        reopen()
    return stream


async def follow(source: Source, take: Callable[[Mapping[str, Any]], None], is_busy: asyncio.Event, what: str) -> None:
    """Read `source` while something runs, and once more to its end after that, for what came in between. A version that
    has none, and one that fails, only costs a warning."""
    has_failed = was_busy = False
    while True:
        if not was_busy:
            await is_busy.wait()
        was_busy = is_busy.is_set()
        try:
            async for each in _opened(source):
                take(each)
                await asyncio.sleep(0)  # what has come already is given without a pause
        except Exception as error:
            if not has_failed:
                log.warning("TensorRT-LLM tells no %s: %s: %s", what, type(error).__name__, error)
            has_failed = True
            await asyncio.sleep(RETRY_S)
        await asyncio.sleep(POLL_S)


async def first_iteration(source: Source) -> IterationStats | None:
    """Return the statistics of what has run; None where there are none."""
    try:
        async for entry in _opened(source):
            return read_iteration_stats(entry)
    except Exception as error:
        log.warning("TensorRT-LLM tells no statistics: %s: %s", type(error).__name__, error)
    return None


class IterationReader:
    """Reads the JSON object of each iteration. With the overlap scheduler an iteration's own latency covers about two
    of them: the time between two that follow each other is nearer the truth."""

    def __init__(self) -> None:
        self._last: IterationStats | None = None

    def read(self, entry: Mapping[str, Any]) -> Iteration:
        stats = read_iteration_stats(entry)
        speculation = part_of(entry, "specDecodingStats")
        num_drafted = int(speculation.get("numDraftTokens") or 0)
        num_accepted = int(speculation.get("numAcceptedTokens") or 0)
        return Iteration(stats, self._seconds(stats), num_drafted, num_accepted)

    def _seconds(self, stats: IterationStats) -> float:
        last, self._last = self._last, stats
        latency_s = stats.latency_ms / 1e3
        if last is None or stats.iteration != last.iteration + 1:
            return latency_s
        if stats.timestamp_us is None or last.timestamp_us is None:
            return latency_s
        apart_s = (stats.timestamp_us - last.timestamp_us) / 1e6
        return apart_s if 0.0 < apart_s < latency_s else latency_s


def read_iteration_stats(entry: Mapping[str, Any]) -> IterationStats:
    """Return the statistics of one iteration's JSON object. Unknown keys are ignored."""
    batch = part_of(entry, "inflightBatchingStats") or part_of(entry, "staticBatchingStats")
    return IterationStats(
        iteration=int(entry.get("iter") or 0),
        latency_ms=float(entry.get("iterLatencyMS") or 0.0),
        timestamp_us=_timestamp_us(entry.get("timestamp")),
        acceptance_length=_number(part_of(entry, "specDecodingStats"), "acceptanceLength"),
        **_named(entry, _TOP),
        **_named(part_of(entry, "kvCacheStats"), _KV_CACHE),
        **_named(batch, _BATCH),
    )


def _timestamp_us(text: Any) -> int | None:
    """Return microseconds since 1970 of "MM-DD-YYYY HH:MM:SS.micros", which is in local time."""
    try:
        local = datetime.strptime(str(text), _TIMESTAMP).astimezone()
    except ValueError:
        return None
    return round((local - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6)


def part_of(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside an object; an empty one where it is missing or null."""
    part = entry.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(part: Mapping[str, Any], key: str) -> Any:
    value = part.get(key)
    return value if isinstance(value, int | float) else None


def _named(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: _number(part, theirs) for ours, theirs in names.items()}
