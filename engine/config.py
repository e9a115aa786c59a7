"""The configuration of an engine: one frozen value, read once and passed in."""

import ipaddress
from enum import StrEnum
from typing import Any

import msgspec

from sluice.errors import invalid


class SchedulerPolicy(StrEnum):
    """Names of the capacity policies, with TensorRT-LLM's meaning. `sluice.engine.scheduling.planner` has the
    policies."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


class Speculation(StrEnum):
    """The sources of draft tokens."""

    OFF = "off"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


class Runtime(StrEnum):
    """The runtimes that execute models. For AUTO, `sluice.engine.runtimes` chooses one."""

    AUTO = "auto"
    OPENVINO = "openvino"
    TENSORRT_LLM = "tensorrt_llm"
    TORCH = "torch"
    VLLM = "vllm"


class Task(StrEnum):
    """The things that a model may be served for. AUTO is EMBED for the checkpoint of a sentence-transformers model,
    SCORE for one of sequence classification, and else GENERATE."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class EngineRole(StrEnum):
    """The part that an engine has in a fleet."""

    GENERATE = "generate"
    PREFILL = "prefill"
    """It computes prompts that other engines generate from, and generates itself only where no other can."""


DTYPE_WORDS = {"bfloat16": "bf16", "float32": "f32", "float": "f32", "half": "float16", "f16": "float16"}
"""torch's and vLLM's words for values of `EngineConfig.dtype`."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The TCP endpoints at which an engine takes clients beside its launcher, and which clients those may be."""

    endpoints: list[str]
    """Each `tcp://HOST:PORT`; HOST is an address or `*`, and port 0 is one that is free."""
    curve_key: str | None = None
    """File of the engine's secret certificate. With it connections are encrypted, and clients show a key."""
    allowed_clients: str | None = None
    """Folder of the certificates of the clients that may connect; needed with `curve_key`."""
    is_insecure: bool = False
    """Whether endpoints that other machines reach may be without keys."""

    def __post_init__(self) -> None:
        """Raise SluiceError INVALID for an endpoint that is none, or that lacks its keys."""
        if (self.curve_key is None) != (self.allowed_clients is None):
            raise invalid(
                "allowed_clients", "a CURVE key and a folder of allowed clients need each other; one is missing"
            )
        if self.is_insecure and self.curve_key is not None:
            raise invalid("insecure", "an endpoint is insecure or has a CURVE key, not both")
        for endpoint in self.endpoints:
            host = _tcp_host(endpoint)
            if self.curve_key is None and not self.is_insecure and not _is_loopback(host):
                raise invalid(
                    "listen",
                    f"{endpoint} is open to other machines, which needs a CURVE key and allowed clients, or that "
                    f"insecure is said in so many words",
                )


def _tcp_host(endpoint: str) -> str:
    """Return the host of a TCP endpoint. Raises INVALID for one that cannot be bound."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > 65_535:
        raise invalid("listen", f"an endpoint must be tcp://HOST:PORT, such as tcp://0.0.0.0:5557, got {endpoint!r}")
    return host.strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or *
        return host == "localhost"


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
    memory_share: float = 1.0
    """The share of the free memory that this engine may count on, where several on one machine have it together."""
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
    chooses_chunk: bool = False
    """Whether the engine chooses by load how many tokens of prompts a step takes, up to `max_num_batched_tokens`."""
    max_queued_requests: int = 512
    """Most requests waiting to be admitted; one more is rejected at once."""
    max_queued_tokens: int | None = None
    """Most prompt tokens waiting to be admitted; a request beyond them is rejected at once. Default: no limit."""
    max_replayed_tokens: int = 256
    """Most output of a stream that is computed one token a step again, as it was, where the engine that brought it is
    lost. Longer output is computed like a prompt: sooner, but in bf16 its text may go on differently."""
    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    enable_prefix_caching: bool = True
    """Whether blocks of finished requests are kept for others that begin with the same tokens."""
    kv_host_cache_bytes: int = 0
    """Host memory for blocks that the KV cache gives up. 0 keeps none."""
    kv_disk_cache: str | None = None
    """Folder of a file for blocks that host memory gives up. Default: none is kept."""
    kv_disk_cache_bytes: int = 8 << 30
    """Most bytes of that file."""
    tenant_weights: dict[str, float] = {}
    """Each tenant's share of the served tokens; 1 for tenants not named."""
    speculation: Speculation = Speculation.OFF
    num_speculative_tokens: int = 4
    """Most draft tokens of a sequence in one step. Raising it pays only if most are accepted."""
    draft_model_path: str | None = None
    """Checkpoint of the draft model; it must have the same vocabulary."""
    num_threads: int | None = None
    """Threads of the runtime, and of choosing tokens. Default: one for each core."""
    runtime: Runtime = Runtime.AUTO
    device: str = "auto"
    """Where the runtime computes, if it can do so in several places: auto, cpu, cuda."""
    task: Task = Task.AUTO
    role: EngineRole = EngineRole.GENERATE
    """The engine's part in a fleet."""
    is_replica: bool = False
    """Whether it is one of several engines of this gateway, which chooses among them by what each has cached."""
    has_prefill_replicas: bool = False
    """Whether other engines compute prompts for this one, for a runtime that must be ready for it (TensorRT-LLM)."""
    tensor_parallel_size: int = 1
    """Number of GPUs that share each layer."""
    pipeline_parallel_size: int = 1
    """Number of GPU groups among which the layers are divided."""
    lora_modules: dict[str, str] = {}
    """Folders of LoRA adapters, by the name that requests use."""
    enable_lora: bool = False
    """Whether adapters can be loaded at run time, where `lora_modules` names none. It makes each step a bit longer."""
    enable_sleep_mode: bool = False
    """Whether the engine can be put to sleep, where its runtime can."""
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

    kv_events_endpoint: str | None = None
    """ZeroMQ endpoint at which the prefix cache's events are published in vLLM's format: `tcp://*:5557` is bound, a
    host's is connected to. vLLM has its own, by its setting kv_events_config. Default: none."""
    kv_events_replay_endpoint: str | None = None
    """Endpoint that is bound for subscribers to ask for events that they have missed. Default: none."""
    kv_events_topic: str = ""
    """Topic of the events; llm-d wants `kv@HOST:PORT@MODEL`."""
    listening: Listening | None = None
    """Where the engine takes clients over TCP. Default: nowhere."""

    def __post_init__(self) -> None:
        """Check the limits. Raises SluiceError INVALID if decode alone might not fit into a step."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise invalid(
                "max_num_batched_tokens",
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"sequence gets its token in each step, got {self.max_num_batched_tokens}",
            )
        if self.role is EngineRole.PREFILL and not self.enable_prefix_caching:
            message = "role prefill hands over blocks of the prefix cache, which enable_prefix_caching turns off"
            raise invalid("role", message)
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            message = "kv_events_replay_endpoint needs kv_events_endpoint; without it there are no events"
            raise invalid("kv_events_replay_endpoint", message)
