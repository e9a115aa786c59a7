"""How an engine is set up: one frozen value, read once and passed in."""

from enum import StrEnum
from typing import Any

import msgspec

from sluice.errors import invalid


class SchedulerPolicy(StrEnum):
    """Who may hold KV blocks; TensorRT-LLM's names and meaning."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


class Speculation(StrEnum):
    """Where draft tokens come from."""

    OFF = "off"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


class Runtime(StrEnum):
    """What runs the model. `engine.runtimes` chooses where nobody says."""

    AUTO = "auto"
    OPENVINO = "openvino"
    TENSORRT_LLM = "tensorrt_llm"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits use vLLM's names. None means: chosen at load from the model and the machine."""

    model_path: str
    dtype: str = "auto"
    """Precision of the computation: auto (bf16 where the CPU has it), bf16, f32."""
    max_model_len: int | None = None
    """Longest prompt + output of one sequence, in tokens. Default: what the model was made for."""
    num_blocks: int | None = None
    """KV cache blocks. Raising it costs memory and lets more sequences run at once."""
    kv_cache_memory_bytes: int | None = None
    """KV cache size where `num_blocks` is not given."""
    kv_cache_memory_fraction: float | None = None
    """KV cache size as a share of the memory that is free once the model is loaded, where neither is given."""
    kv_cache_dtype: str = "auto"
    """Type of the cached keys and values: auto (as `dtype`), bf16, f32 or u8. u8 halves memory and costs agreement."""
    quantization: str = "none"
    """Compression of the weights at load: none, int8, int4."""
    cache_path: str | None = None
    """Folder of what is made once from a checkpoint: compressed weights, converted models. Default: ~/.cache/sluice."""
    max_num_seqs: int = 64
    """Most sequences in one step. Raising it lengthens each step."""
    max_num_batched_tokens: int = 512
    """Most tokens in one step: decode first, then prefill chunks. Raising it speeds prefill, roughens decode."""
    max_queued_requests: int = 512
    """Most requests waiting to be admitted; one more is refused at once."""
    max_queued_tokens: int | None = None
    """Most prompt tokens waiting to be admitted; beyond them a request is refused at once. Default: no bound."""
    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    enable_prefix_caching: bool = True
    """Keep the blocks of finished requests for others that begin with the same tokens."""
    tenant_weights: dict[str, float] = {}
    """Share of each tenant in the served tokens; 1 for those not named."""
    speculation: Speculation = Speculation.OFF
    num_speculative_tokens: int = 4
    """Most draft tokens a sequence gets in one step. Raising it pays only where most are accepted."""
    draft_model_path: str | None = None
    """Checkpoint of the draft model; it must have the same vocabulary."""
    num_threads: int | None = None
    """Threads of the runtime. Default: one a core."""
    runtime: Runtime = Runtime.AUTO
    tensor_parallel_size: int = 1
    """GPUs that share each layer."""
    pipeline_parallel_size: int = 1
    """Groups of GPUs that have the layers in turn."""
    lora_modules: dict[str, str] = {}
    """Folders of LoRA adapters, by the name that requests ask for."""
    tokenizer_path: str | None = None
    """Where the tokenizer is, for a runtime that needs one (guided decoding). Default: in `model_path`."""
    engine_python: str | None = None
    """Python that runs the engine's process where TensorRT-LLM does: it may have an environment of its own, which then
    needs this package, numpy, msgspec, pyzmq and packaging. Default: the gateway's."""
    launcher: list[str] = []
    """Command that the engine's process is started by, as `mpirun -n 8 trtllm-llmapi-launch`. Default: none."""
    runtime_settings: dict[str, str] = {}
    """Settings of TensorRT-LLM that have no field here, by the names in
    `engine.delegated.tensorrt_llm.configuration.catalogue`."""
    llm_arguments: dict[str, Any] = {}
    """Arguments of TensorRT-LLM's LLM class as they are, over all else."""

    def __post_init__(self) -> None:
        """Raises SluiceError INVALID where decode alone could not fit into a step."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise invalid(
                "max_num_batched_tokens",
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"sequence gets its token in each step, got {self.max_num_batched_tokens}",
            )
