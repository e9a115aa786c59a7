"""What each parameter of an LLM's config.pbtxt does on TensorRT-LLM, where that is not what it does everywhere.

What is in neither table is a setting of TensorRT-LLM, if
`engine.delegated.tensorrt_llm.configuration.catalogue` has one of that name.
"""

from engine.config import SchedulerPolicy, Speculation
from engine.delegated.tensorrt_llm.configuration.catalogue import ENGINES, SETTINGS
from pipelines.llm.effects import NOTHING, Effect, Rule, chooses, counts, truth, without_effect, without_effect_unless
from pipelines.llm.lora_modules import lora_modules
from pipelines.llm.shared_rules import NO_CACHE_SIZE, SHARED
from pipelines.llm.speculative_config import drafting, speculative_config

_GIBIBYTE = 1 << 30


def rule_of(key: str, *, is_compiled: bool) -> Rule | None:
    """What parameter `key` does to a model that is, or is not, an engine when it runs; None for one that is unknown."""
    rule = RULES.get(key)
    if rule is not None:
        return rule
    setting = SETTINGS.get(key)
    if setting is None:
        return None
    if setting.no_effect:
        return without_effect(setting.no_effect)
    if setting.backend == ENGINES and not is_compiled:
        return without_effect("only compiled engines have it, and this model is none")
    return _setting(key)


def _setting(key: str) -> Rule:
    """The setting of that name, or with that alias."""

    def rule(text: str) -> Effect:
        setting = SETTINGS[key]
        try:
            setting.parse(text)
        except ValueError as error:
            raise ValueError(f"must be {error}") from None
        return Effect(settings={setting.name: text})

    return rule


def _batching(text: str) -> Effect:
    """Its own name for a batch that nobody joins is the scheduler's policy, which both of its backends have."""
    match text.lower():
        case "inflight_fused_batching" | "inflight_batching" | "inflight":
            return NOTHING
        case "v1" | "static":
            return Effect({"scheduler_policy": SchedulerPolicy.STATIC_BATCH})
    raise ValueError("must be inflight_fused_batching, inflight_batching or V1")


def _cache_tokens(text: str) -> Effect:
    """The smaller of this and the share of the memory holds, so the share stays."""
    no_size = {name: value for name, value in NO_CACHE_SIZE.items() if name != "kv_cache_memory_fraction"}
    return Effect(no_size, settings=_setting("max_tokens_in_paged_kv_cache")(text).settings)


def _swap_space(text: str) -> Effect:
    """vLLM's GiB of host memory for each GPU."""
    try:
        size_bytes = int(float(text) * _GIBIBYTE)
    except (ValueError, OverflowError):
        size_bytes = -1
    if size_bytes < 0:
        raise ValueError("must be a number of GiB of at least 0")
    return _setting("kv_cache_host_memory_bytes")(str(size_bytes))


def _dtype(text: str) -> Effect:
    found = _DTYPES.get(text.lower())
    if found is None:
        raise ValueError(f"must be one of {', '.join(_DTYPES)}")
    return Effect({"dtype": found})


def _cache_dtype(text: str) -> Effect:
    """vLLM has two kinds of fp8, TensorRT-LLM one."""
    lowered = text.lower()
    if lowered.startswith("fp8"):
        return Effect({"kv_cache_dtype": "fp8"}, "fp8 is e4m3" if lowered == "fp8_e5m2" else "")
    return chooses("kv_cache_dtype", "auto", "fp8", "nvfp4")(lowered)


def _quantization(text: str) -> Effect:
    lowered = text.lower()
    if lowered in _CHECKPOINT_METHODS:
        return Effect(note="weights are taken as the checkpoint has them")
    return Effect({"quantization": lowered})


def _draft_source(text: str) -> Effect:
    try:
        return Effect({"speculation": Speculation(text)})
    except ValueError:
        raise ValueError(f"must be one of {', '.join(Speculation)}") from None


def _decoding(text: str) -> Effect:
    """How requests sample is theirs to say."""
    is_sampling = text.lower() in ("auto", "top_k", "top_p", "top_k_top_p", "beam_search")
    return NOTHING if is_sampling else drafting(**_setting("decoding_mode")(text).settings)


def _draft_kind(text: str) -> Effect:
    return drafting(**_setting("speculative_decoding_type")(text).settings)


def _executor_backend(text: str) -> Effect:
    """vLLM's way to start its workers."""
    return _setting("orchestrator_type")("ray") if text == "ray" else NOTHING


def _has_lora(text: str) -> Effect:
    """It has them where adapters are named."""
    truth(text)
    return NOTHING


_CHECKPOINT_METHODS = frozenset({"awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "modelopt", "mxfp4"})
"""vLLM's words for what a checkpoint's config.json tells anyway."""
_DTYPES = {
    "auto": "auto",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f32": "f32",
    "float": "f32",
    "float32": "f32",
    "half": "float16",
    "float16": "float16",
}

RULES: dict[str, Rule] = {
    **SHARED,
    # tensorrtllm_backend
    "gpt_model_type": _batching,
    "batching_type": _batching,
    "batching_strategy": _batching,
    "max_tokens_in_paged_kv_cache": _cache_tokens,
    "decoding_mode": _decoding,
    "speculative_decoding_type": _draft_kind,
    "num_nodes": without_effect_unless(("1",), "processes are placed by what starts them (--engine-launcher)"),
    # vLLM
    "tensor_parallel_size": counts("tensor_parallel_size"),
    "tp_size": counts("tensor_parallel_size"),
    "pipeline_parallel_size": counts("pipeline_parallel_size"),
    "pp_size": counts("pipeline_parallel_size"),
    "data_parallel_size": without_effect_unless(("1",), "one engine serves all requests; see enable_attention_dp"),
    "distributed_executor_backend": _executor_backend,
    "swap_space": _swap_space,
    "cpu_offload_gb": without_effect("weights stay on the GPU"),
    "enable_lora": _has_lora,
    "speculative_config": speculative_config,
    # the engine's own
    "dtype": _dtype,
    "quantization": _quantization,
    "kv_cache_dtype": _cache_dtype,
    "speculation": _draft_source,
    "draft_model_path": lambda text: Effect({"draft_model_path": text}),
    "lora_modules": lambda text: Effect({"lora_modules": lora_modules(text)}),
    # A model may come with a request, and must not say what this server runs.
    "engine_launcher": without_effect("a command is taken from the server's own command line alone, --engine-launcher"),
    "num_threads": without_effect("TensorRT-LLM chooses its threads itself"),
}
"""By parameter."""
