"""The configuration of an engine: one frozen value, read once and passed in."""

from enum import StrEnum
from typing import Any

import msgspec

from sluice.errors import invalid


class SchedulerPolicy(StrEnum):
    """Names of the capacity policies, with TensorRT-LLM's meaning. `engine.scheduling.policies` has the policies."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


class Speculation(StrEnum):
    """The sources of draft tokens."""

    OFF = "off"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


class Runtime(StrEnum):
    """The runtimes that execute models. For AUTO, `engine.runtimes` chooses one."""

    AUTO = "auto"
    OPENVINO = "openvino"
    TENSORRT_LLM = "tensorrt_llm"
    VLLM = "vllm"


class Task(StrEnum):
    """The things that a model may be served for. AUTO is EMBED for the checkpoint of a sentence-transformers model, and
    else GENERATE."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"


DTYPE_WORDS = {"bfloat16": "bf16", "float32": "f32", "float": "f32", "half": "float16", "f16": "float16"}
"""torch's and vLLM's words for values of `EngineConfig.dtype`."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine is told at its start, named as in vLLM. None means chosen at load for model and machine."""

    model_path: str
    dtype: str = "auto"
    """Precision of the computation: auto (bf16 if the CPU has it), bf16, f32."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output together. Default: what the model was made for."""
    num_blocks: int | None = None
    """Number of KV cache blocks. Raising it costs memory and lets more sequences run at once."""
    kv_cache_memory_bytes: int | None = None
    """KV cache size if `num_blocks` is not given."""
    kv_cache_memory_fraction: float | None = None
    """KV cache size as a fraction of the memory that is free once the model is loaded, if neither is given."""
    kv_cache_dtype: str = "auto"
    """Type of the cached keys and values: auto (as `dtype`), bf16, f32 or u8. u8 halves memory and costs accuracy."""
    quantization: str = "none"
    """Compression of the weights at load: none, int8, int4."""
    cache_path: str | None = None
    """Folder of files made once from a checkpoint: compressed weights, converted models. Default: ~/.cache/sluice."""
    max_num_seqs: int = 64
    """Most sequences in one step. Raising it lengthens each step."""
    max_num_batched_tokens: int = 512
    """Most tokens in one step: decode first, then prefill chunks. Raising it speeds up prefill and delays decode."""
    max_queued_requests: int = 512
    """Most requests waiting to be admitted; one more is rejected at once."""
    max_queued_tokens: int | None = None
    """Most prompt tokens waiting to be admitted; a request beyond them is rejected at once. Default: no limit."""
    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    enable_prefix_caching: bool = True
    """Whether blocks of finished requests are kept for others that begin with the same tokens."""
    tenant_weights: dict[str, float] = {}
    """Each tenant's share of the served tokens; 1 for tenants not named."""
    speculation: Speculation = Speculation.OFF
    num_speculative_tokens: int = 4
    """Most draft tokens of a sequence in one step. Raising it pays only if most are accepted."""
    draft_model_path: str | None = None
    """Checkpoint of the draft model; it must have the same vocabulary."""
    num_threads: int | None = None
    """Threads of the runtime. Default: one for each core."""
    runtime: Runtime = Runtime.AUTO
    task: Task = Task.AUTO
    tensor_parallel_size: int = 1
    """Number of GPUs that share each layer."""
    pipeline_parallel_size: int = 1
    """Number of GPU groups among which the layers are divided."""
    lora_modules: dict[str, str] = {}
    """Folders of LoRA adapters, by the name that requests use."""
    enable_lora: bool = False
    """Whether adapters can be loaded at run time, where `lora_modules` names none. It makes each step a bit longer."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer, for a runtime that needs one (guided decoding). Default: `model_path`."""
    engine_python: str | None = None
    """Python interpreter of the process of a TensorRT-LLM or vLLM engine. Its environment needs this package, numpy,
    msgspec, pyzmq and packaging. Default: the gateway's interpreter."""
    launcher: list[str] = []
    """Command that starts the engine's process, such as `mpirun -n 8 trtllm-llmapi-launch`. Default: none."""
    runtime_settings: dict[str, str] = {}
    """Settings of the runtime without a field of their own, by the names in its `RuntimeSpec.settings`."""
    llm_arguments: dict[str, Any] = {}
    """Arguments of TensorRT-LLM's LLM class, or vLLM's engine arguments; they override everything else."""

    def __post_init__(self) -> None:
        """Check the limits. Raises SluiceError INVALID if decode alone might not fit into a step."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise invalid(
                "max_num_batched_tokens",
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"sequence gets its token in each step, got {self.max_num_batched_tokens}",
            )
