"""An iteration in figures, under the keys of TensorRT-LLM's JSON."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Iteration:
    """The figures of one iteration."""

    number: int
    latency_ms: float
    num_new: int
    num_active: int
    num_queued: int
    num_completed: int
    num_contexts: int
    num_generations: int
    num_paused: int
    context_tokens: int
    max_active: int
    max_batch_size: int
    max_num_tokens: int
    max_blocks: int
    free_blocks: int
    tokens_per_block: int
    allocated_total: int
    allocated_new: int
    reused: int
    missed: int


def statistics(told: Iteration, *, has_parts: bool) -> dict[str, Any]:
    """Return the JSON object of an iteration. Without `has_parts` its sub-objects are null, as they may be."""
    hits = told.reused + told.missed
    cache = {
        "maxNumBlocks": told.max_blocks,
        "freeNumBlocks": told.free_blocks,
        "usedNumBlocks": told.max_blocks - told.free_blocks,
        "tokensPerBlock": told.tokens_per_block,
        "allocTotalBlocks": told.allocated_total,
        "allocNewBlocks": told.allocated_new,
        "reusedBlocks": told.reused,
        "missedBlocks": told.missed,
        "cacheHitRate": told.reused / hits if hits else 0.0,
    }
    batching = {
        "numScheduledRequests": told.num_contexts + told.num_generations,
        "numContextRequests": told.num_contexts,
        "numGenRequests": told.num_generations,
        "numPausedRequests": told.num_paused,
        "numCtxTokens": told.context_tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": 0.0,
    }
    return {
        "timestamp": datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
        "iter": told.number,
        "iterLatencyMS": told.latency_ms,
        "newActiveRequestsQueueLatencyMS": 0.0,
        "numNewActiveRequests": told.num_new,
        "numActiveRequests": told.num_active,
        "numQueuedRequests": told.num_queued,
        "numCompletedRequests": told.num_completed,
        "maxNumActiveRequests": told.max_active,
        "maxBatchSizeStatic": told.max_batch_size,
        "maxBatchSizeTunerRecommended": 0,
        "maxBatchSizeRuntime": told.max_batch_size,
        "maxNumTokensStatic": told.max_num_tokens,
        "maxNumTokensTunerRecommended": 0,
        "maxNumTokensRuntime": told.max_num_tokens,
        "gpuMemUsage": 2**33,
        "cpuMemUsage": 2**30,
        "pinnedMemUsage": 2**28,
        "kvCacheStats": cache if has_parts else None,
        "staticBatchingStats": None,
        "inflightBatchingStats": batching if has_parts else None,
        "specDecodingStats": None,
    }
