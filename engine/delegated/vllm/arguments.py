"""From an EngineConfig to the engine arguments of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.engine.config import EngineConfig, Speculation, Task
from sluice.engine.delegated.vllm.library import INSTALL, VllmLibrary
from sluice.engine.delegated.vllm.settings import LEFT_OUT, SETTINGS
from sluice.engine.model_folder import read_json, served_task
from sluice.engine.runtime_settings import nearest_names
from sluice.errors import ErrorCode, SluiceError, invalid

_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
"""vLLM's names of types, where they are not ours."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank`."""
_RUN_TIME_RANK, _RUN_TIME_ADAPTERS = 64, 4
"""The largest rank and the adapters in one step where adapters come at run time, unless settings say otherwise."""
_TOKENIZER_FILE = "tokenizer.json"
_CPU_CACHE_BYTES = 1 << 30
"""KV cache on a CPU where nothing is said; vLLM would take nearly all memory."""
_CACHE_SIZES = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
"""A number of blocks is none of them: with it alone vLLM still asks for nearly all memory."""
_NGRAM_SIZE = 3
_OWN_SPECULATION = frozenset({"speculative_config", "spec_method"})


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """How vLLM is started: `AsyncEngineArgs(**arguments)`."""

    arguments: dict[str, Any]
    has_tokenizer: bool
    """Whether it has the model's tokenizer, which grammars need."""
    task: Task = Task.GENERATE
    """The task that the model is served for."""

    def __str__(self) -> str:
        return f"AsyncEngineArgs({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def plan_vllm(config: EngineConfig, library: VllmLibrary) -> VllmPlan:
    """Resolve the arguments: our fields, over them the settings, over these `llm_arguments`, all by vLLM's names.
    Raises INVALID or UNIMPLEMENTED that names the setting, what it held and what is expected."""
    tokenizer = Path(config.tokenizer_path or config.model_path)
    has_tokenizer = (tokenizer / _TOKENIZER_FILE).is_file()
    given = _given(config)
    task = served_task(config)
    if task is not Task.GENERATE:
        config = _without_adapters(config, task)
    arguments = {
        **_from_fields(config, given),
        "runner": "generate" if task is Task.GENERATE else "pooling",
        "tokenizer": str(tokenizer),
        "skip_tokenizer_init": not has_tokenizer,
        "enable_logging_iteration_details": True,
        **given,
        "model": config.model_path,
    }
    if has_tokenizer:
        # The grammars of all runtimes are llguidance's, which this backend is.
        arguments["structured_outputs_config"] = {
            **_mapping(arguments.get("structured_outputs_config")), "backend": "guidance"
        }  # fmt: skip
    if task is not Task.GENERATE:
        arguments["enable_prefix_caching"] = arguments["enable_prefix_caching"] and None  # vLLM knows for which models
    if library.is_on_cpu and not _CACHE_SIZES & arguments.keys():
        arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    if config.enable_sleep_mode and not library.is_on_cpu:  # on a CPU scheduling alone sleeps
        arguments.setdefault("enable_sleep_mode", True)
    _check_known(given, library)
    return VllmPlan(arguments, has_tokenizer and not arguments["skip_tokenizer_init"], task)


def _given(config: EngineConfig) -> dict[str, Any]:
    """Return what was given by vLLM's own names."""
    settings = {name: value for name, value in SETTINGS.check(config.runtime_settings).items() if SETTINGS[name].target}
    for name, value in config.llm_arguments.items():
        SETTINGS.find(name)
        if name in LEFT_OUT:
            raise invalid(name, f"{name} must be left out: {LEFT_OUT[name]}, got {value!r}")
    return settings | config.llm_arguments


def _check_known(given: dict[str, Any], library: VllmLibrary) -> None:
    known = library.engine_arguments
    for name in given:
        if name not in known:
            message = f"vLLM {library.version} has no argument {name}{nearest_names(name, known)}; install {INSTALL}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=name)


def _from_fields(config: EngineConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    if config.kv_cache_memory_fraction is not None:
        message = (
            "kv_cache_memory_fraction has another meaning in vLLM, a share of all memory with the weights in it; give "
            "the setting gpu_memory_utilization, or kv_cache_memory_bytes"
        )
        raise invalid("kv_cache_memory_fraction", message)
    arguments: dict[str, Any] = {
        "dtype": _DTYPES.get(config.dtype, config.dtype),
        "kv_cache_dtype": _DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.num_blocks is not None:
        arguments["num_gpu_blocks_override"] = config.num_blocks + 1  # one is vLLM's own
    if config.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    if config.quantization != "none":
        arguments["quantization"] = config.quantization
    if config.lora_modules or config.enable_lora:
        arguments |= _for_adapters(config)
    if config.speculation is not Speculation.OFF and not _OWN_SPECULATION & given.keys():
        arguments["speculative_config"] = _speculation(config)
    return arguments


def _without_adapters(config: EngineConfig, task: Task) -> EngineConfig:
    """Return the configuration of a model that generates nothing. Raises UNIMPLEMENTED for what is for those."""
    if config.lora_modules or config.speculation is not Speculation.OFF:
        name = "lora_modules" if config.lora_modules else "speculation"
        message = f"{name} must be left out where vLLM serves a model for {task}: it is for generation"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=name)
    return msgspec.structs.replace(config, enable_lora=False)


def _speculation(config: EngineConfig) -> dict[str, Any]:
    count = {"num_speculative_tokens": config.num_speculative_tokens}
    if config.speculation is Speculation.NGRAM:
        return {"method": "ngram", "prompt_lookup_max": _NGRAM_SIZE, **count}
    if config.draft_model_path is None:
        raise invalid("draft_model_path", "draft_model_path must be given where speculation is draft_model")
    return {"model": config.draft_model_path, "method": "draft_model", **count}


def _for_adapters(config: EngineConfig) -> dict[str, Any]:
    """Return room for the adapters: the least rank that vLLM has which is enough for all, and for further ones."""
    modules = config.lora_modules
    rank = max(map(_read_rank, modules, modules.values()), default=1)
    number = len(modules)
    if config.enable_lora:
        rank, number = max(rank, _RUN_TIME_RANK), max(number, _RUN_TIME_ADAPTERS)
    enough = next((each for each in _RANKS if each >= rank), None)
    if enough is None:
        raise invalid("lora_modules", f"LoRA adapters of vLLM have a rank of at most {_RANKS[-1]}, got {rank}")
    return {"enable_lora": True, "max_loras": number, "max_lora_rank": enough}


def check_adapter(name: str, folder: str, lora_config: Any) -> None:
    """Raise SluiceError for an adapter that vLLM was started without room for. `lora_config` is vLLM's."""
    if lora_config is None:
        message = "vLLM was started without LoRA; start it with --lora-modules or --allow-runtime-lora-updating"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_name")
    rank, most = _read_rank(name, folder), lora_config.max_lora_rank
    if rank > most:
        message = f"LoRA adapter {name}: r must be at most {most}, got {rank}; the setting max_lora_rank raises it"
        raise invalid("lora_path", message)


def _read_rank(name: str, folder: str) -> int:
    rank = read_json(Path(folder) / "adapter_config.json").get("r")
    if not isinstance(rank, int) or rank < 1:
        raise invalid("lora_modules", f"LoRA adapter {name}: r in adapter_config.json must be 1 or more, got {rank!r}")
    return rank


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
