"""TensorRT-LLM's iteration statistics under our names, and what of them outlives an iteration.

Which fields there are differs by version and backend, and all of them may be null or missing.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from engine.types import IterationStats

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


def iteration_stats(told: Mapping[str, Any]) -> IterationStats:
    """What an iteration tells; `told` is the JSON object. Unknown keys are ignored."""
    batch = _part(told, "inflightBatchingStats") or _part(told, "staticBatchingStats")
    speculation = _part(told, "specDecodingStats")
    return IterationStats(
        iteration=int(told.get("iter") or 0),
        latency_ms=float(told.get("iterLatencyMS") or 0.0),
        timestamp_us=timestamp_us(told.get("timestamp")),
        acceptance_length=_number(speculation, "acceptanceLength"),
        **_named(told, _TOP),
        **_named(_part(told, "kvCacheStats"), _KV_CACHE),
        **_named(batch, _BATCH),
    )


def drafts_of(told: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens that speculation proposed in an iteration, and those of them that the model agreed with."""
    speculation = _part(told, "specDecodingStats")
    return int(speculation.get("numDraftTokens") or 0), int(speculation.get("numAcceptedTokens") or 0)


def timestamp_us(text: Any) -> int | None:
    """Microseconds since 1970 of "MM-DD-YYYY HH:MM:SS.micros" in local time, as TensorRT-LLM writes it."""
    try:
        local = datetime.strptime(str(text), _TIMESTAMP).astimezone()
    except ValueError:
        return None
    return round((local - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6)


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = told.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(part: Mapping[str, Any], key: str) -> Any:
    told = part.get(key)
    return told if isinstance(told, int | float) else None


def _named(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: _number(part, theirs) for ours, theirs in names.items()}


class StepTimes:
    """Seconds of iterations. With the overlap scheduler an iteration's own latency covers about two of them; the time
    between two that follow each other is nearer the truth."""

    def __init__(self) -> None:
        self._last: IterationStats | None = None

    def seconds(self, stats: IterationStats) -> float:
        last, self._last = self._last, stats
        latency_s = stats.latency_ms / 1e3
        if last is None or stats.iteration != last.iteration + 1:
            return latency_s
        if stats.timestamp_us is None or last.timestamp_us is None:
            return latency_s
        apart_s = (stats.timestamp_us - last.timestamp_us) / 1e6
        return apart_s if 0.0 < apart_s < latency_s else latency_s
