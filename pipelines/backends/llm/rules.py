"""What each parameter of an LLM's config.pbtxt does: one table of TensorRT-LLM's, vLLM's and our own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.config import SchedulerPolicy, Speculation

TOKENS_PER_BLOCK = 32
"""Of the KV cache on the CPU."""


_MOST_SEQS, _MOST_DRAFTED, _MOST_THREADS = 4096, 32, 1024
"""What the command line allows."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a parameter does. `fields` are of EngineConfig; a note without any says why it does nothing."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


Rule = Callable[[str], Effect]
"""Reads a parameter's text. Raises ValueError with what it must be, or what to do."""

NOTHING = Effect()


# -- how texts are read


def truth(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError("must be true or false")


def _integer(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise ValueError(f"must be an integer of at least {least}" + (f" and at most {most}" if most else ""))
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError("must be a number above 0 and at most 1")
    return value


# -- rules


def _counts(name: str, least: int = 1, most: int | None = None) -> Rule:
    """An integer that is a field of EngineConfig."""
    return lambda text: Effect({name: _integer(text, least, most)})


def _chooses(name: str, *allowed: str) -> Rule:
    def rule(text: str) -> Effect:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return Effect({name: text})

    return rule


def _without_effect(why: str) -> Rule:
    return lambda text: Effect(note=why)


def _without_effect_unless(neutral: tuple[str, ...], why: str) -> Rule:
    """No word is lost over a value that is what happens anyway."""
    return lambda text: NOTHING if text.lower() in neutral else Effect(note=why)


def _refused_unless(neutral: tuple[str, ...], instead: str) -> Rule:
    def rule(text: str) -> Effect:
        if text.lower() not in neutral:
            raise ValueError(instead)
        return NOTHING

    return rule


def _taken_elsewhere(text: str) -> Effect:
    return NOTHING


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


def _decoding(text: str) -> Effect:
    match text:
        case "auto" | "top_k" | "top_p" | "top_k_top_p":
            return NOTHING
        case "lookahead":
            note = "tokens are drafted from what was said before (speculation ngram); answers are the same"
            return Effect({"speculation": Speculation.NGRAM}, note)
        case "medusa" | "eagle" | "redrafter" | "explicit_draft_tokens" | "external_draft_tokens":
            return Effect(note=f"no tokens are drafted by {text}; answers are the same, and come slower")
        case "beam_search":
            raise ValueError(_NO_BEAMS)
    raise ValueError("must be auto, top_k, top_p, top_k_top_p, lookahead, medusa, eagle or redrafter")


def _beams(text: str) -> Effect:
    if _integer(text, 0) > 1:
        raise ValueError(_NO_BEAMS)
    return NOTHING


def _cache_tokens(text: str) -> Effect:
    return Effect({**_NO_CACHE_SIZE, "num_blocks": -(-_integer(text, 1) // TOKENS_PER_BLOCK)})


def _cache_fraction(text: str) -> Effect:
    return Effect({**_NO_CACHE_SIZE, "kv_cache_memory_fraction": _fraction(text)})


def _reuse(text: str) -> Effect:
    return Effect({"enable_prefix_caching": truth(text)})


def _chunked(text: str) -> Effect:
    return NOTHING if truth(text) else Effect(note="prompts are read in chunks all the same, of max_num_tokens a step")


def _excludes_input(text: str) -> Effect:
    truth(text)
    return NOTHING


def _dtype(text: str) -> Effect:
    found = _DTYPES.get(text.lower())
    if found is None:
        raise ValueError(f"must be one of {', '.join(_DTYPES)}")
    is_half = text.lower() in ("float16", "half")
    return Effect({"dtype": found}, "it is bf16 where the CPU has that, else f32" if is_half else "")


def _cache_dtype(text: str) -> Effect:
    if text.startswith("fp8"):
        return Effect({"kv_cache_dtype": "u8"}, "u8 holds as many tokens as fp8")
    return _chooses("kv_cache_dtype", "auto", "bf16", "f32", "u8")(text)


def _quantization(text: str) -> Effect:
    if text in ("none", "int8", "int4"):
        return Effect({"quantization": text})
    return Effect(note="weights are taken as the checkpoint has them")


def _speculation(text: str) -> Effect:
    """vLLM's speculative_config, as JSON."""
    try:
        settings = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ValueError("must be a JSON object") from None
    if settings.get("method") not in ("ngram", "[ngram]"):
        return Effect(note="only the method ngram is known; no tokens are drafted, answers are the same")
    count = settings.get("num_speculative_tokens", 4)
    if type(count) is not int or not 1 <= count <= _MOST_DRAFTED:
        raise ValueError(f"must have from 1 to {_MOST_DRAFTED} num_speculative_tokens")
    return Effect({"speculation": Speculation.NGRAM, "num_speculative_tokens": count})


_NO_BEAMS = "must be for one beam: beam search is not offered, as it cannot stream; set max_beam_width to 1"
_NO_CACHE_SIZE = {"num_blocks": None, "kv_cache_memory_bytes": None, "kv_cache_memory_fraction": None}
"""A model's own size wins over the command line's, whichever way that gave it."""
_DTYPES = {
    "auto": "auto",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f32": "f32",
    "float": "f32",
    "float32": "f32",
    "half": "auto",
    "float16": "auto",
}
_ON_CPU = _without_effect("there is no GPU to set up")
_ONE_DEVICE = _without_effect_unless(("1",), "the model runs on one device")
_NO_DRAFTS = _without_effect("belongs to a way to draft tokens that is not here; answers are the same")
_NO_LORA = _without_effect("there are no LoRA adapters here; requests that name one are refused")
_NO_PERIOD = _without_effect("nothing is polled: cancellations and statistics arrive at once")
_NO_WINDOW = _without_effect("attention reaches over the whole context, but for the model's own windows")

RULES: dict[str, Rule] = {
    # TensorRT-LLM: batching
    "batch_scheduler_policy": _policy,
    "scheduler_policy": _policy,
    "gpt_model_type": _batching,
    "batching_type": _batching,
    "batching_strategy": _batching,
    "max_batch_size": _counts("max_num_seqs", 1, _MOST_SEQS),
    "max_num_sequences": _counts("max_num_seqs", 1, _MOST_SEQS),
    "max_num_tokens": _counts("max_num_batched_tokens"),
    "max_queue_size": _counts("max_queued_requests", 0),
    "max_queue_delay_microseconds": _without_effect("a request joins the running batch at its next step"),
    "enable_chunked_context": _chunked,
    "enable_trt_overlap": _ON_CPU,
    # TensorRT-LLM: KV cache
    "max_tokens_in_paged_kv_cache": _cache_tokens,
    "kv_cache_free_gpu_mem_fraction": _cache_fraction,
    "kv_cache_host_memory_bytes": _without_effect_unless(("0",), "the KV cache has no second home in host memory"),
    "kv_cache_onboard_blocks": _without_effect("the KV cache has no second home in host memory"),
    "cross_kv_cache_fraction": _without_effect("the model has no encoder"),
    "enable_kv_cache_reuse": _reuse,
    "max_attention_window_size": _NO_WINDOW,
    "sink_token_length": _NO_WINDOW,
    # TensorRT-LLM: decoding
    "decoding_mode": _decoding,
    "max_beam_width": _beams,
    "exclude_input_in_output": _excludes_input,
    "normalize_log_probs": _without_effect("it is about beams, and there is one"),
    "medusa_choices": _NO_DRAFTS,
    "eagle_choices": _NO_DRAFTS,
    "lookahead_window_size": _NO_DRAFTS,
    "lookahead_ngram_size": _NO_DRAFTS,
    "lookahead_verification_set_size": _NO_DRAFTS,
    "speculative_decoding_fast_logits": _NO_DRAFTS,
    "guided_decoding_backend": _without_effect_unless(("llguidance",), "grammars are llguidance's work"),
    "xgrammar_tokenizer_info_path": _without_effect("grammars need no file"),
    # TensorRT-LLM: where things are
    "gpt_model_path": _taken_elsewhere,
    "engine_dir": _taken_elsewhere,
    "tokenizer_dir": _taken_elsewhere,
    "tokenizer_type": _without_effect("the tokenizer is taken as its files say"),
    "encoder_model_path": _refused_unless((), "must be unset: models with an encoder are not offered"),
    "encoder_engine_dir": _refused_unless((), "must be unset: models with an encoder are not offered"),
    # TensorRT-LLM: processes and devices
    "executor_worker_path": _without_effect("the engine is a process of its own"),
    "gpu_device_ids": _ON_CPU,
    "participant_ids": _without_effect("the model runs in one process"),
    "num_nodes": _ONE_DEVICE,
    "gpu_weights_percent": _ON_CPU,
    "multi_block_mode": _ON_CPU,
    "enable_context_fmha_fp32_acc": _ON_CPU,
    "cuda_graph_mode": _ON_CPU,
    "cuda_graph_cache_size": _ON_CPU,
    "FORCE_CPU_ONLY_INPUT_TENSORS": _ON_CPU,
    "cancellation_check_period_ms": _NO_PERIOD,
    "stats_check_period_ms": _NO_PERIOD,
    "recv_poll_period_ms": _NO_PERIOD,
    "iter_stats_max_iterations": _NO_PERIOD,
    "request_stats_max_iterations": _NO_PERIOD,
    "lora_cache_optimal_adapter_size": _NO_LORA,
    "lora_cache_max_adapter_size": _NO_LORA,
    "lora_cache_gpu_memory_fraction": _NO_LORA,
    "lora_cache_host_memory_bytes": _NO_LORA,
    "lora_prefetch_dir": _NO_LORA,
    # vLLM's engine arguments
    "model": _taken_elsewhere,
    "tokenizer": _taken_elsewhere,
    "gpu_memory_utilization": _cache_fraction,
    "enable_chunked_prefill": _chunked,
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "distributed_executor_backend": _ON_CPU,
    "enforce_eager": _ON_CPU,
    "swap_space": _without_effect("the KV cache has no second home in host memory"),
    "cpu_offload_gb": _ON_CPU,
    "block_size": _without_effect_unless((str(TOKENS_PER_BLOCK),), f"blocks have {TOKENS_PER_BLOCK} tokens"),
    "seed": _without_effect("a request that samples without a seed gets one of its own"),
    "trust_remote_code": _without_effect_unless(("false",), "no code of a checkpoint is ever run"),
    "enable_lora": _without_effect_unless(("false",), "there are no LoRA adapters here"),
    "speculative_config": _speculation,
    "scheduling_policy": _without_effect("requests are ordered by priority, fair share and arrival"),
    "served_model_name": _without_effect("a model is called as its folder is"),
    "disable_log_stats": _without_effect("statistics are on the metrics page"),
    "disable_log_requests": _without_effect("requests are not logged"),
    "enable_metrics": _without_effect("statistics are on the metrics page"),
    "REPORT_CUSTOM_METRICS": _without_effect("statistics are on the metrics page"),
    # the engine's own
    "dtype": _dtype,
    "quantization": _quantization,
    "kv_cache_dtype": _cache_dtype,
    "max_model_len": _counts("max_model_len", 2),
    "max_num_seqs": _counts("max_num_seqs", 1, _MOST_SEQS),
    "max_num_batched_tokens": _counts("max_num_batched_tokens"),
    "max_queued_requests": _counts("max_queued_requests", 0),
    "max_queued_tokens": _counts("max_queued_tokens"),
    "num_blocks": lambda text: Effect({**_NO_CACHE_SIZE, "num_blocks": _integer(text, 1)}),
    "enable_prefix_caching": _reuse,
    "speculation": _chooses("speculation", Speculation.OFF, Speculation.NGRAM),
    "num_speculative_tokens": _counts("num_speculative_tokens", 1, _MOST_DRAFTED),
    "num_threads": _counts("num_threads", 1, _MOST_THREADS),
}
"""By parameter."""
