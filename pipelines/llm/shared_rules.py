"""The parameters of an LLM's config.pbtxt that mean the same on every runtime."""

from typing import Any

from engine.config import Runtime, SchedulerPolicy, Speculation
from pipelines.llm.effects import (
    MOST_DRAFTED,
    MOST_SEQS,
    NOTHING,
    Effect,
    Rule,
    chooses,
    counts,
    fraction,
    integer,
    refused,
    taken_elsewhere,
    truth,
    without_effect,
)

NO_CACHE_SIZE: dict[str, Any] = {
    "num_blocks": None,
    "kv_cache_memory_bytes": None,
    "kv_cache_memory_fraction": None,
}
"""A model's own size wins over the command line's, whichever way that gave it."""


def _policy(text: str) -> Effect:
    try:
        return Effect({"scheduler_policy": SchedulerPolicy(text.lower())})
    except ValueError:
        return Effect(note=f"'{text[:40]}' is no policy; {SchedulerPolicy.GUARANTEED_NO_EVICT} holds")


def _batching(text: str) -> Effect:
    match text:
        case "inflight_fused_batching" | "inflight_batching":
            return NOTHING
        case "V1":
            return Effect({"scheduler_policy": SchedulerPolicy.STATIC_BATCH})
    raise ValueError("must be inflight_fused_batching, inflight_batching or V1")


def _cache_fraction(text: str) -> Effect:
    return Effect({**NO_CACHE_SIZE, "kv_cache_memory_fraction": fraction(text)})


def _reuse(text: str) -> Effect:
    return Effect({"enable_prefix_caching": truth(text)})


def _excludes_input(text: str) -> Effect:
    truth(text)
    return NOTHING


def runtime_of(text: str) -> Runtime:
    """Raises ValueError for a word that is none."""
    try:
        return Runtime(text.lower())
    except ValueError:
        raise ValueError(f"must be one of {', '.join(Runtime)}") from None


def _runtime(text: str) -> Effect:
    """It chooses the table of rules, so it is obeyed before they are read."""
    runtime_of(text)
    return NOTHING


_NO_ENCODER = refused("must be unset: models with an encoder are not offered")
_NO_PERIOD = without_effect("nothing is polled: cancellations and statistics arrive at once")
_ON_METRICS_PAGE = without_effect("statistics are on the metrics page")

SHARED: dict[str, Rule] = {
    # TensorRT-LLM: batching
    "batch_scheduler_policy": _policy,
    "scheduler_policy": _policy,
    "gpt_model_type": _batching,
    "batching_type": _batching,
    "batching_strategy": _batching,
    "max_batch_size": counts("max_num_seqs", 1, MOST_SEQS),
    "max_num_sequences": counts("max_num_seqs", 1, MOST_SEQS),
    "max_num_tokens": counts("max_num_batched_tokens"),
    "max_queue_size": counts("max_queued_requests", 0),
    "max_queue_delay_microseconds": without_effect("a request joins the running batch at its next step"),
    # TensorRT-LLM: KV cache
    "kv_cache_free_gpu_mem_fraction": _cache_fraction,
    "enable_kv_cache_reuse": _reuse,
    # TensorRT-LLM: answers
    "exclude_input_in_output": _excludes_input,
    # TensorRT-LLM: where things are
    "gpt_model_path": taken_elsewhere,
    "engine_dir": taken_elsewhere,
    "tokenizer_dir": taken_elsewhere,
    "tokenizer_type": without_effect("the tokenizer is taken as its files say"),
    "xgrammar_tokenizer_info_path": without_effect("grammars need no file"),
    "encoder_model_path": _NO_ENCODER,
    "encoder_engine_dir": _NO_ENCODER,
    # TensorRT-LLM: processes
    "executor_worker_path": without_effect("the engine is a process of its own"),
    "cancellation_check_period_ms": _NO_PERIOD,
    "stats_check_period_ms": _NO_PERIOD,
    "recv_poll_period_ms": _NO_PERIOD,
    # vLLM's engine arguments
    "model": taken_elsewhere,
    "tokenizer": taken_elsewhere,
    "gpu_memory_utilization": _cache_fraction,
    "seed": without_effect("a request that samples without a seed gets one of its own"),
    "scheduling_policy": without_effect("requests are ordered by priority, fair share and arrival"),
    "served_model_name": without_effect("a model is called as its folder is"),
    "disable_log_stats": _ON_METRICS_PAGE,
    "disable_log_requests": without_effect("requests are not logged"),
    "enable_metrics": _ON_METRICS_PAGE,
    "REPORT_CUSTOM_METRICS": _ON_METRICS_PAGE,
    # the engine's own
    "runtime": _runtime,
    "max_model_len": counts("max_model_len", 2),
    "max_seq_len": counts("max_model_len", 2),
    "max_num_seqs": counts("max_num_seqs", 1, MOST_SEQS),
    "max_num_batched_tokens": counts("max_num_batched_tokens"),
    "max_queued_requests": counts("max_queued_requests", 0),
    "max_queued_tokens": counts("max_queued_tokens"),
    "num_blocks": lambda text: Effect({**NO_CACHE_SIZE, "num_blocks": integer(text, 1)}),
    "enable_prefix_caching": _reuse,
    "speculation": chooses("speculation", Speculation.OFF, Speculation.NGRAM),
    "num_speculative_tokens": counts("num_speculative_tokens", 1, MOST_DRAFTED),
}
"""By parameter."""
