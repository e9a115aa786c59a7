"""Effects of an LLM's config.pbtxt parameters on TensorRT-LLM, where they differ from those on every runtime. A
parameter in neither table is a setting, if `configuration.catalogue` of its folder in `engine` has it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice.engine.config import EngineConfig, SchedulerPolicy, Speculation, Task
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import (
    CONFIGS,
    DECODING_TYPE,
    ENGINES,
    FIELDS,
    SETTINGS,
    VERSIONS,
)
from sluice.engine.model_folder import ModelFormat, model_format
from sluice.engine.runtime_settings import full_names, json_or_text, nearest_names
from sluice.engine.runtimes import RUNTIMES
from sluice.pipelines.llm.model_folder import parse_lora_modules
from sluice.pipelines.llm.parameter_effects import (
    MAX_DRAFT_TOKENS,
    NOTHING,
    SHARED_RULES,
    UNSET_CACHE_SIZE,
    CodeChoices,
    Effect,
    Rule,
    choice_field,
    chooses_code,
    guarded,
    ignored,
    ignored_unless,
    integer_field,
    parse_bool,
    parse_dtype,
    parse_integer,
    parse_object,
    rejected,
    setting_rule,
)

_DEFAULT_NUM_DRAFTS = 4
"""Tokens to draft where `speculative_config` does not say."""
_DECODING_TYPES = {"eagle": "Eagle", "eagle3": "Eagle", "medusa": "Medusa"}
"""TensorRT-LLM's decoding types by vLLM's method. Its Eagle includes Eagle3 in every version."""
_SAMPLING_MODES = frozenset({"auto", "top_k", "top_p", "top_k_top_p", "beam_search"})
"""Values of `decoding_mode` that draft no tokens."""
_DRAFT_TREES = frozenset(
    {
        "eagle_choices",
        "medusa_choices",
        "lookahead_window_size",
        "lookahead_ngram_size",
        "lookahead_verification_set_size",
    }
)
"""Parameters of NVIDIA's template that belong to a `decoding_mode` that drafts. A filled file has them beside any."""
_COMPILED = (ModelFormat.TENSORRT_LLM_ENGINE, ModelFormat.TENSORRT_LLM_CHECKPOINT)
"""Formats that run as compiled engines."""
TENSORRT_LLM_CODE: CodeChoices = dict.fromkeys(
    (
        "batched_logits_processor",
        "calib_config.calib_dataset",  # a dataset may come with a script that loads it
        "checkpoint_loader",
        "custom_tokenizer",
        "env_overrides",
        "kv_connector_config",
        "mpi_session",
        "post_processor_hook",
        "ray_worker_extension_cls",
        "ray_worker_nsight_options",  # options of a command
        "speculative_config.drafter",
        "speculative_config.resource_manager",
        "trust_remote_code",
    ),
    bool,
)
_DRAFT_LEN = "speculative_config.max_draft_len"
_GIBIBYTE = 1 << 30
_CHECKPOINT_METHODS = frozenset({"awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "modelopt", "mxfp4"})
"""vLLM's names of quantization methods that a checkpoint's config.json names itself."""


def tensorrt_llm_rules(engine: EngineConfig, texts: Mapping[str, str]) -> Callable[[str], Rule | None]:
    """Return a function that finds the rule of a parameter, None for an unknown one. `texts` are the parameters."""
    backend = texts.get("backend", engine.llm_arguments.get("backend"))
    mode = texts.get("decoding_mode", "").lower()
    is_compiled = backend == "tensorrt" or model_format(Path(engine.model_path)) in _COMPILED

    def find_rule(key: str) -> Rule | None:
        setting = SETTINGS.get(key)
        rule = find_unguarded(key)
        if rule is None and not chooses_code(key, True, TENSORRT_LLM_CODE):
            return None
        parse = json_or_text if setting is None else setting.parse
        return guarded(rule or (lambda text: NOTHING), SETTINGS.target(key), parse, TENSORRT_LLM_CODE)

    def find_unguarded(key: str) -> Rule | None:
        rule, setting = TENSORRT_LLM_RULES.get(key), SETTINGS.get(key)
        if rule is not None:
            return rule
        if setting is None:
            return _renamed(key)
        if key in _DRAFT_TREES and mode in _SAMPLING_MODES:
            return ignored(f"decoding_mode {mode} drafts no tokens")
        if setting.backend == ENGINES and not is_compiled and not setting.no_effect:
            return ignored("only compiled engines have it, and this model is none")
        return setting_rule(setting)

    return find_rule


def _renamed(key: str) -> Rule | None:
    """Return a rule that tells the full name of a setting; None for a name that it is not short for, or that is another
    runtime's."""
    names = full_names(key, SETTINGS)
    if not names or any(key in spec.settings for spec in RUNTIMES.values()):
        return None
    return rejected(f"must be given by its full name, {' or '.join(names[:3])}")


def _batching(text: str) -> Effect:
    """Map static batching to the scheduler's policy, which both backends of TensorRT-LLM have."""
    match text.lower():
        case "inflight_fused_batching" | "inflight_batching" | "inflight":
            return NOTHING
        case "v1" | "static":
            return Effect({"scheduler_policy": SchedulerPolicy.STATIC_BATCH})
    raise ValueError("must be inflight_fused_batching, inflight_batching or V1")


def _cache_tokens(text: str) -> Effect:
    """Set the size in tokens, and keep the share of memory: the smaller of the two applies."""
    no_size = {name: value for name, value in UNSET_CACHE_SIZE.items() if name != "kv_cache_memory_fraction"}
    return Effect(no_size, settings=setting_rule(SETTINGS["max_tokens_in_paged_kv_cache"])(text).settings)


def _swap_space(text: str) -> Effect:
    """Convert vLLM's host memory, in GiB for each GPU."""
    try:
        size_bytes = int(float(text) * _GIBIBYTE)
    except (ValueError, OverflowError):
        size_bytes = -1
    if size_bytes < 0:
        raise ValueError("must be a number of GiB of at least 0")
    return setting_rule(SETTINGS["kv_cache_host_memory_bytes"])(str(size_bytes))


def _cache_dtype(text: str) -> Effect:
    """Map the two kinds of fp8 that vLLM has to the one of TensorRT-LLM."""
    lowered = text.lower()
    if lowered.startswith("fp8"):
        return Effect({"kv_cache_dtype": "fp8"}, "fp8 is e4m3" if lowered == "fp8_e5m2" else "")
    return choice_field("kv_cache_dtype", "auto", "fp8", "nvfp4")(lowered)


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
    """Set the mode where it is a way to draft tokens. Sampling modes are left to the requests."""
    return (
        NOTHING if text.lower() in _SAMPLING_MODES else _drafts(setting_rule(SETTINGS["decoding_mode"])(text).settings)
    )


def _speculative_config(text: str) -> Effect:
    """Read vLLM's `speculative_config`."""
    given = parse_object(text)
    method = str(given.get("method", "draft_model")).strip("[]")
    count = parse_integer(str(given.get("num_speculative_tokens", _DEFAULT_NUM_DRAFTS)), 1, MAX_DRAFT_TOKENS)
    if method == "ngram":
        return Effect({"speculation": Speculation.NGRAM, "num_speculative_tokens": count})
    if method == "mtp" or method.endswith("_mtp"):
        return _drafts({DECODING_TYPE: "MTP", _DRAFT_LEN: str(count)})
    return _drafts_of_model(method, given.get("model"), count)


def _drafts_of_model(method: str, model: object, count: int) -> Effect:
    if method != "draft_model" and method not in _DECODING_TYPES:
        raise ValueError(f"must have one of the methods ngram, draft_model, {', '.join(_DECODING_TYPES)} or mtp")
    if not isinstance(model, str):
        raise ValueError(f"must name the model of method {method}, in model")
    if method in _DECODING_TYPES:
        kind = _DECODING_TYPES[method]
        return _drafts({DECODING_TYPE: kind, "speculative_config.speculative_model": model, _DRAFT_LEN: str(count)})
    fields = {"speculation": Speculation.DRAFT_MODEL, "draft_model_path": model, "num_speculative_tokens": count}
    return Effect(fields)


def _drafts(settings: Mapping[str, str]) -> Effect:
    """Use the model's own way to draft tokens in place of the command line's."""
    return Effect({"speculation": Speculation.OFF}, settings=settings)


def _executor_backend(text: str) -> Effect:
    """Read vLLM's way to start workers, of which only ray has an equivalent."""
    return setting_rule(SETTINGS["orchestrator_type"])("ray") if text == "ray" else NOTHING


TENSORRT_LLM_RULES: dict[str, Rule] = {
    **SHARED_RULES,
    # tensorrtllm_backend
    "gpt_model_type": _batching,
    "batching_type": _batching,
    "batching_strategy": _batching,
    "max_tokens_in_paged_kv_cache": _cache_tokens,
    "decoding_mode": _decoding,
    "speculative_decoding_type": lambda text: _drafts({DECODING_TYPE: text}),
    DECODING_TYPE: lambda text: _drafts({DECODING_TYPE: text}),
    "num_nodes": ignored_unless(("1",), "processes are placed by what starts them (--engine-launcher)"),
    # NVIDIA's own names of what the command line's options set too
    "kv_cache_config.free_gpu_memory_fraction": SHARED_RULES["kv_cache_free_gpu_mem_fraction"],
    "kv_cache_config.max_tokens": _cache_tokens,
    "kv_cache_config.dtype": _cache_dtype,
    "kv_cache_config.enable_block_reuse": SHARED_RULES["enable_kv_cache_reuse"],
    "scheduler_config.capacity_scheduler_policy": SHARED_RULES["batch_scheduler_policy"],
    "task": choice_field("task", *Task),
    # vLLM
    "tensor_parallel_size": integer_field("tensor_parallel_size"),
    "tp_size": integer_field("tensor_parallel_size"),
    "pipeline_parallel_size": integer_field("pipeline_parallel_size"),
    "pp_size": integer_field("pipeline_parallel_size"),
    "data_parallel_size": ignored_unless(("1",), "one engine serves all requests; see enable_attention_dp"),
    "distributed_executor_backend": _executor_backend,
    "swap_space": _swap_space,
    "cpu_offload_gb": ignored("weights stay on the GPU"),
    "enable_lora": lambda text: Effect({"enable_lora": parse_bool(text)}),
    "speculative_config": _speculative_config,
    # this engine's own parameters
    "dtype": lambda text: Effect({"dtype": parse_dtype(text)}),
    "quantization": _quantization,
    "kv_cache_dtype": _cache_dtype,
    "speculation": _draft_source,
    "draft_model_path": lambda text: Effect({"draft_model_path": text}),
    "lora_modules": lambda text: Effect({"lora_modules": parse_lora_modules(text)}),
    # Models may be uploaded by a request, which must not choose a command for the server to run.
    "engine_launcher": ignored("a command is taken from the server's own command line alone, --engine-launcher"),
    "num_threads": ignored("TensorRT-LLM chooses its threads itself"),
}
"""Rules by parameter."""


def unknown_arguments(arguments: Mapping[str, Any], config: str = "") -> Iterator[str]:
    """Yield notes on the arguments of the LLM class that no known version has. The installed one decides at load."""
    for key, value in arguments.items():
        name = f"{config}{key}"
        if name in CONFIGS and isinstance(value, Mapping):
            yield from unknown_arguments(value, f"{name}.")
        elif name not in FIELDS and name not in CONFIGS:
            known = f"no argument of TensorRT-LLM {VERSIONS[0]} to {VERSIONS[-1]}{nearest_names(name, FIELDS)}"
            yield f"{name} is {known}; other versions refuse it at load too, unless they have it"
