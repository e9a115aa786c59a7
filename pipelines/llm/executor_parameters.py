"""Effects of config.pbtxt parameters of an LLM on our executor, with OpenVINO and with torch."""

from sluice.engine.config import Speculation, Task
from sluice.engine.runners.torch.runtime import TORCH
from sluice.pipelines.llm.model_folder import parse_lora_modules
from sluice.pipelines.llm.parameter_effects import (
    MAX_DRAFT_TOKENS,
    MAX_THREADS,
    NO_PERIOD,
    NOTHING,
    SHARED_RULES,
    UNSET_CACHE_SIZE,
    Effect,
    Rule,
    choice_field,
    ignored,
    ignored_unless,
    integer_field,
    parse_bool,
    parse_dtype,
    parse_integer,
    parse_object,
    setting_rule,
)

TOKENS_PER_BLOCK = 32
"""Tokens of a block of the KV cache on the CPU."""


_NO_BEAMS = "must be for one beam: beam search is not offered, as it cannot stream; set max_beam_width to 1"
_ON_CPU = ignored("there is no GPU to set up")
_ONE_DEVICE = ignored_unless(("1",), "the model runs on one device")
_NO_DRAFTS = ignored("belongs to a way to draft tokens that is not here; answers are the same")
_LORA_CACHE = ignored("all LoRA adapters are in memory, and `lora_modules` has them")
_NO_WINDOW = ignored("attention reaches over the whole context, but for the model's own windows")
_BY_ITSELF = ignored("torch's runner sets up the GPU by itself")
_NO_OFFLOAD = ignored("all weights are on the device")


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
    if parse_integer(text, 0) > 1:
        raise ValueError(_NO_BEAMS)
    return NOTHING


def _cache_tokens(text: str) -> Effect:
    return Effect({**UNSET_CACHE_SIZE, "num_blocks": -(-parse_integer(text, 1) // TOKENS_PER_BLOCK)})


def _chunked(text: str) -> Effect:
    if parse_bool(text):
        return NOTHING
    return Effect(note="prompts are read in chunks all the same, of max_num_tokens a step")


def _dtype(text: str) -> Effect:
    dtype = parse_dtype(text)
    if dtype == "float16":
        return Effect({"dtype": "auto"}, "it is bf16 where the CPU has that, else f32")
    return Effect({"dtype": dtype})


def _cache_dtype(text: str) -> Effect:
    if text.startswith("fp8"):
        return Effect({"kv_cache_dtype": "u8"}, "u8 holds as many tokens as fp8")
    return choice_field("kv_cache_dtype", "auto", "bf16", "f32", "u8")(text)


def _quantization(text: str) -> Effect:
    if text in ("none", "int8", "int4"):
        return Effect({"quantization": text})
    return Effect(note="weights are taken as the checkpoint has them")


def _speculation(text: str) -> Effect:
    """Read vLLM's `speculative_config`."""
    settings = parse_object(text)
    if settings.get("method") not in ("ngram", "[ngram]"):
        return Effect(note="only the method ngram is known; no tokens are drafted, answers are the same")
    count = settings.get("num_speculative_tokens", 4)
    if type(count) is not int or not 1 <= count <= MAX_DRAFT_TOKENS:
        raise ValueError(f"must have from 1 to {MAX_DRAFT_TOKENS} num_speculative_tokens")
    return Effect({"speculation": Speculation.NGRAM, "num_speculative_tokens": count})


OPENVINO_RULES: dict[str, Rule] = {
    **SHARED_RULES,
    # TensorRT-LLM: batching
    "enable_chunked_context": _chunked,
    "enable_trt_overlap": _ON_CPU,
    # TensorRT-LLM: KV cache
    "max_tokens_in_paged_kv_cache": _cache_tokens,
    "kv_cache_host_memory_bytes": integer_field("kv_host_cache_bytes", 0),
    "kv_cache_onboard_blocks": ignored("blocks always come back to the KV cache before they are used"),
    "cross_kv_cache_fraction": ignored("the model has no encoder"),
    "max_attention_window_size": _NO_WINDOW,
    "sink_token_length": _NO_WINDOW,
    # TensorRT-LLM: decoding
    "decoding_mode": _decoding,
    "max_beam_width": _beams,
    "normalize_log_probs": ignored("it is about beams, and there is one"),
    "medusa_choices": _NO_DRAFTS,
    "eagle_choices": _NO_DRAFTS,
    "lookahead_window_size": _NO_DRAFTS,
    "lookahead_ngram_size": _NO_DRAFTS,
    "lookahead_verification_set_size": _NO_DRAFTS,
    "speculative_decoding_fast_logits": _NO_DRAFTS,
    "guided_decoding_backend": ignored_unless(("llguidance",), "grammars are llguidance's work"),
    # TensorRT-LLM: processes and devices
    "gpu_device_ids": _ON_CPU,
    "participant_ids": ignored("the model runs in one process"),
    "num_nodes": _ONE_DEVICE,
    "gpu_weights_percent": _ON_CPU,
    "multi_block_mode": _ON_CPU,
    "enable_context_fmha_fp32_acc": _ON_CPU,
    "cuda_graph_mode": _ON_CPU,
    "cuda_graph_cache_size": _ON_CPU,
    "FORCE_CPU_ONLY_INPUT_TENSORS": _ON_CPU,
    "iter_stats_max_iterations": NO_PERIOD,
    "request_stats_max_iterations": NO_PERIOD,
    "lora_cache_optimal_adapter_size": _LORA_CACHE,
    "lora_cache_max_adapter_size": _LORA_CACHE,
    "lora_cache_gpu_memory_fraction": _LORA_CACHE,
    "lora_cache_host_memory_bytes": _LORA_CACHE,
    "lora_prefetch_dir": _LORA_CACHE,
    "lora_dir": _LORA_CACHE,
    "lora_modules": lambda text: Effect({"lora_modules": parse_lora_modules(text)}),
    # vLLM's engine arguments
    "enable_chunked_prefill": _chunked,
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "distributed_executor_backend": _ON_CPU,
    "enforce_eager": _ON_CPU,
    "swap_space": ignored("no sequence is swapped out; kv_cache_host_memory_bytes keeps blocks in host memory"),
    "cpu_offload_gb": _ON_CPU,
    "block_size": ignored_unless((str(TOKENS_PER_BLOCK),), f"blocks have {TOKENS_PER_BLOCK} tokens"),
    "trust_remote_code": ignored_unless(("false",), "no code of a checkpoint is ever run"),
    "enable_lora": lambda text: Effect({"enable_lora": parse_bool(text)}),
    "speculative_config": _speculation,
    # this engine's own parameters
    "device": ignored_unless(("auto", "cpu"), "OpenVINO computes on the CPU here"),
    "dtype": _dtype,
    "quantization": _quantization,
    "kv_cache_dtype": _cache_dtype,
    "task": choice_field("task", *Task),
    "num_threads": integer_field("num_threads", 1, MAX_THREADS),
    "engine_launcher": ignored("the engine is one process"),
}
"""Rules by parameter."""


def _torch_cache_dtype(text: str) -> Effect:
    if text.startswith("fp8"):
        return Effect(note="the KV cache has the type of the computation on torch")
    return choice_field("kv_cache_dtype", *TORCH.kv_cache_dtypes)(text)


def _torch_quantization(text: str) -> Effect:
    return Effect(note="" if text == "none" else "weights are taken as the checkpoint has them")


def _eager(text: str) -> Effect:
    return Effect(settings={"graphs": "false"}) if parse_bool(text) else Effect()


_GRAPHS = setting_rule(TORCH.settings["graphs"])
TORCH_RULES: dict[str, Rule] = {
    **OPENVINO_RULES,
    # TensorRT-LLM: processes and devices
    "enable_trt_overlap": _BY_ITSELF,
    "gpu_device_ids": ignored("CUDA_VISIBLE_DEVICES chooses GPUs"),
    "gpu_weights_percent": _NO_OFFLOAD,
    "multi_block_mode": _BY_ITSELF,
    "enable_context_fmha_fp32_acc": _BY_ITSELF,
    "cuda_graph_mode": _GRAPHS,
    "cuda_graph_cache_size": _BY_ITSELF,
    "FORCE_CPU_ONLY_INPUT_TENSORS": _BY_ITSELF,
    # vLLM's engine arguments
    "tensor_parallel_size": integer_field("tensor_parallel_size", 1),
    "pipeline_parallel_size": integer_field("pipeline_parallel_size", 1),
    "distributed_executor_backend": ignored("torch's runner starts its ranks by itself"),
    "enforce_eager": _eager,
    "cpu_offload_gb": _NO_OFFLOAD,
    # this engine's own parameters
    "device": choice_field("device", *TORCH.device_names),
    "dtype": lambda text: Effect({"dtype": parse_dtype(text)}),
    "graphs": _GRAPHS,
    "quantization": _torch_quantization,
    "kv_cache_dtype": _torch_cache_dtype,
}
"""Rules by parameter."""
