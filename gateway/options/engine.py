"""Options of the engine: model, scheduling, KV cache, speculation. Fields have the names of those of EngineConfig."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from sluice.engine.config import DTYPE_WORDS, EngineConfig, Runtime, SchedulerPolicy, Speculation, Task
from sluice.engine.runtimes import BUNDLED, RUNTIMES, choose_runtime
from sluice.engine.scheduling.planner import LARGEST_CHUNK, POLICIES
from sluice.errors import SluiceError
from sluice.gateway.options.option import (
    Parse,
    choice,
    enum_member,
    fraction,
    integer,
    option,
    printable_text,
    size,
    truth,
    weights,
)

_DEFAULTS = EngineConfig(model_path="")
STEP_SIZES = ("max_num_seqs", "max_num_batched_tokens")
"""Fields of EngineConfig for the requests and tokens of one step, whose defaults depend on the runtime."""
_OTHERS = tuple(spec for spec in RUNTIMES.values() if spec is not BUNDLED)


def _dtype_choice(*allowed: str) -> Parse:
    """Return a parser of one of a few types, which also takes the words that torch and vLLM have for them."""
    aliases = {word: each for word, each in DTYPE_WORDS.items() if each in allowed and word not in allowed}
    parse = choice(*allowed)
    return lambda text: aliases.get(text.lower()) or parse(text)


def _values(field: str) -> tuple[str, ...]:
    """Return the values that any runtime takes, those of the bundled one first. `field` is one of RuntimeSpec."""
    return tuple(dict.fromkeys(chain.from_iterable(getattr(spec, field) for spec in (BUNDLED, *_OTHERS))))


def _more_values(field: str) -> str:
    """Return, for a help text, where the values of other runtimes are not those of the bundled one."""
    bundled = getattr(BUNDLED, field)
    texts = []
    for spec in _OTHERS:
        taken = getattr(spec, field)
        missing = [each for each in bundled if each not in taken]
        text = f"on {spec.title} also {', '.join(each for each in taken if each not in bundled)}"
        texts.append(f"{text}, but not {' or '.join(missing)}" if missing else text)
    return "; ".join(texts)


def _default_sizes(field: str) -> str:
    """Return, for a help text, the default of each runtime. `field` is one of StepSizes."""
    return f"{getattr(BUNDLED.default_step_sizes, field)}{_others_sizes(field)}"


def _others_sizes(field: str) -> str:
    return "".join(f"; {getattr(spec.default_step_sizes, field)} on {spec.title}" for spec in _OTHERS)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Model: what is served"""

    path: str | None = option(
        "MODEL",
        None,
        printable_text("the folder of a HuggingFace checkpoint or its name on the hub"),
        "MODEL",
        "folder of a HuggingFace checkpoint (config.json, *.safetensors, tokenizer.json), of an OpenVINO IR, or of "
        "compiled engines or a converted checkpoint of TensorRT-LLM; or ORG/NAME[@REVISION] on the Hugging Face hub, "
        "which is downloaded once (HF_HOME, HF_TOKEN, HF_ENDPOINT). "
        "Default: rill, the small chat model that comes with Sluice",
    )
    served_model_name: str | None = option(
        "--served-model-name",
        None,
        printable_text("a name without control characters"),
        "NAME",
        "the name clients ask for. Default: the folder's name",
    )
    runtime: Runtime = option(
        "--runtime",
        _DEFAULTS.runtime,
        enum_member(Runtime),
        "RUNTIME",
        f"what runs the model: {'; '.join(f'{spec.runtime}, on {spec.devices}' for spec in RUNTIMES.values())}; auto, "
        "by the folder's files, the GPUs and what is installed. The log says which it is, and why",
    )
    device: str = option(
        "--device",
        _DEFAULTS.device,
        choice(*_values("device_names")),
        "DEVICE",
        "device of the torch runtime: auto, a GPU where there is one; cuda, which fails without one; cpu",
    )
    task: Task = option(
        "--task",
        _DEFAULTS.task,
        enum_member(Task),
        "TASK",
        "task of MODEL: generate; embed, whose vectors are the model's pooled hidden states (/v1/embeddings); or "
        "score, for a cross-encoder on vLLM (/v1/score); auto is embed for the checkpoint of a sentence-transformers "
        "model, and score for one of sequence classification",
    )
    tokenizer_path: str | None = option(
        "--tokenizer",
        None,
        printable_text("the folder of a tokenizer"),
        "FOLDER",
        "folder of MODEL's tokenizer, where MODEL's own has none, as with compiled engines",
    )
    dtype: str = option(
        "--dtype",
        _DEFAULTS.dtype,
        _dtype_choice(*_values("dtypes")),
        "TYPE",
        "precision of the computation: auto, bf16 (or bfloat16), f32 (float32, float), or float16 (half) on "
        "TensorRT-LLM, vLLM and torch. On the CPU auto takes bf16 where that has it, f32 is exact and about half as "
        "fast; on torch auto is bf16 on a GPU; on TensorRT-LLM and vLLM the checkpoint's own",
    )
    quantization: str = option(
        "--quantization",
        _DEFAULTS.quantization,
        choice("none", *_values("quantizations")),
        "TYPE",
        f"compression of the weights at load: none; {' or '.join(BUNDLED.quantizations)}; "
        f"{_more_values('quantizations')}. Fewer bits take less memory and are read faster, and answers differ more "
        "from the uncompressed model's; int4 is for models of some billion weights",
    )
    cache_path: str | None = option(
        "--cache-path",
        None,
        printable_text("a folder"),
        "FOLDER",
        "folder of files made from models and used again: compressed weights, converted models. It may be emptied at "
        "any time. Default: ~/.cache/sluice",
    )


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Scheduling: how requests share the model, and what that costs"""

    scheduler_policy: SchedulerPolicy = option(
        "--scheduler-policy",
        _DEFAULTS.scheduler_policy,
        enum_member(SchedulerPolicy),
        "POLICY",
        "who may hold KV blocks: " + "; ".join(f"{policy.name} {policy.summary}" for policy in POLICIES.values()),
    )
    max_model_len: int | None = option(
        "--max-model-len",
        None,
        integer(2),
        "TOKENS",
        "longest prompt and answer together. Longer ones may hold more KV blocks, so fewer requests run at once. "
        "Default: what the model was trained for",
    )
    max_num_seqs: int | None = option(
        "--max-num-seqs",
        None,
        integer(1, 4096),
        "N",
        "most requests in one step. More raises the total tokens per second, and lengthens every step, so each "
        f"stream gets slower. Default: {_default_sizes('max_num_seqs')}",
    )
    max_num_batched_tokens: int | None = option(
        "--max-num-batched-tokens",
        None,
        integer(1),
        "TOKENS",
        "most tokens in one step: one for each running request, the rest for prompts, which come in chunks. More "
        "brings first tokens sooner, and makes running streams stutter while a prompt is read. At least "
        "--max-num-seqs. Default: chosen by model and load, at most "
        f"{LARGEST_CHUNK}{_others_sizes('max_num_batched_tokens')}",
    )
    max_queued_requests: int = option(
        "--max-queue-size",
        _DEFAULTS.max_queued_requests,
        integer(0),
        "REQUESTS",
        "most requests waiting to be admitted, for want of places or of KV blocks; one more gets 429 with Retry-After, "
        "which says when there will be a place for it. More hides overload from clients behind long waits",
    )
    max_queued_tokens: int | None = option(
        "--max-queue-tokens",
        None,
        integer(1),
        "TOKENS",
        "most prompt tokens waiting to be admitted; a request beyond them gets 429 with Retry-After. It bounds the "
        "wait where prompts are of very different lengths. Default: no bound",
    )
    max_replayed_tokens: int = option(
        "--max-replayed-tokens",
        _DEFAULTS.max_replayed_tokens,
        integer(0),
        "TOKENS",
        "most output of a stream that is computed one token a step again where its engine is lost, which brings the "
        "very text that it would have brought, and takes about as long as the first time. Longer output is computed "
        "like a prompt: its stream pauses for less, and in bf16 its text may go on differently",
    )
    tenant_weights: dict[str, float] | None = option(
        "--tenant-weights",
        None,
        weights,
        "WEIGHTS",
        "shares of tenants (header x-sluice-tenant) in the served tokens while they compete, such as a=2,b=1. "
        "Default: 1 each, and 1 for those not named",
    )
    num_threads: int | None = option(
        "--num-threads",
        None,
        integer(1, 1024),
        "N",
        "threads of the model's runtime, and of choosing tokens. More than there are free cores makes it slower. "
        "Default: one for each core, or for the cores' worth of time that a container may take",
    )


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """KV cache: the memory that running requests share, taken at start"""

    kv_cache_memory_bytes: int | None = option(
        "--kv-cache-memory",
        None,
        size(1 << 20),
        "SIZE",
        "size of the KV cache: bytes, or 256M, 2G. More lets more or longer requests run at once. Default: the larger "
        "of 256M and four requests of full length, and at most half of the free memory",
        aliases=("--kv-cache-memory-bytes",),
    )
    kv_cache_memory_fraction: float | None = option(
        "--kv-cache-memory-fraction",
        None,
        fraction,
        "FRACTION",
        "size of the KV cache instead of --kv-cache-memory: a share, up to 1, of the memory that is free once the "
        "model is loaded. What other programs come to need must be left over",
    )
    num_blocks: int | None = option(
        "--num-blocks",
        None,
        integer(1),
        "N",
        "size of the KV cache instead of --kv-cache-memory: in blocks (of 32 tokens; TensorRT-LLM can be told others)",
    )
    kv_cache_dtype: str = option(
        "--kv-cache-dtype",
        _DEFAULTS.kv_cache_dtype,
        _dtype_choice(*_values("kv_cache_dtypes")),
        "TYPE",
        "type of the cached keys and values: auto (as --dtype), bf16, f32 (or --dtype's words for them) or u8; on "
        "TensorRT-LLM auto, fp8 or nvfp4. "
        "u8 and fp8 hold twice the tokens of bf16, and answers differ a little more from those in f32",
    )
    enable_prefix_caching: bool = option(
        "--enable-prefix-caching",
        _DEFAULTS.enable_prefix_caching,
        truth,
        None,
        "keep the blocks of finished requests, so that a prompt that begins as an earlier one need not be computed "
        "again. Costs no memory: kept blocks are given up, longest unused first, when others are wanted",
    )
    kv_events_endpoint: str | None = option(
        "--kv-events-endpoint",
        None,
        printable_text("an endpoint of ZeroMQ"),
        "ENDPOINT",
        "publish what enters and leaves the prefix cache in vLLM's format, for routers that read it: tcp://*:5557 is "
        "bound, a host's address is connected to. It is readable for whoever reaches it, prompts' tokens included. For "
        "one model on openvino, torch or TensorRT-LLM; vLLM has the setting kv_events_config",
    )
    kv_events_replay_endpoint: str | None = option(
        "--kv-events-replay-endpoint",
        None,
        printable_text("an endpoint of ZeroMQ"),
        "ENDPOINT",
        "address at which subscribers request the last 10,000 batches of events, tcp://*:5558 for example",
    )
    kv_events_topic: str = option(
        "--kv-events-topic",
        "",
        printable_text("a topic"),
        "TOPIC",
        "topic of the events; llm-d wants kv@HOST:PORT@MODEL",
    )
    kv_host_cache_bytes: int = option(
        "--kv-host-cache-bytes",
        _DEFAULTS.kv_host_cache_bytes,
        size(0),
        "SIZE",
        "memory beside the KV cache for the blocks that it gives up, which come back when a prompt begins with them: "
        "bytes, or 256M, 2G. More keeps more prefixes. 0 keeps none",
    )
    kv_disk_cache: str | None = option(
        "--kv-disk-cache",
        None,
        printable_text("a folder"),
        "FOLDER",
        "folder of a file for the blocks that --kv-host-cache-bytes gives up. A server that starts again with the "
        "same model finds them. They hold prompts and answers: everyone who can read the folder can recover them",
    )
    kv_disk_cache_bytes: int = option(
        "--kv-disk-cache-bytes",
        _DEFAULTS.kv_disk_cache_bytes,
        size(1 << 20),
        "SIZE",
        "most bytes of that file; each engine has its own",
    )


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Speculative decoding: several tokens of a sequence in one step. It turns itself off where it does not pay"""

    speculation: Speculation = option(
        "--speculation",
        _DEFAULTS.speculation,
        enum_member(Speculation),
        "SOURCE",
        "source of draft tokens: off; ngram, which copies what followed the same words before (for answers that "
        "quote their prompt); draft_model, a small model (--draft-model). Greedy answers stay the same",
    )
    num_speculative_tokens: int = option(
        "--num-speculative-tokens",
        _DEFAULTS.num_speculative_tokens,
        integer(1, 32),
        "TOKENS",
        "most draft tokens a sequence gets in one step. More pays only where most are accepted: each that is not was "
        "computed for nothing",
    )
    draft_model_path: str | None = option(
        "--draft-model",
        None,
        printable_text("the folder of a HuggingFace checkpoint"),
        "MODEL",
        "checkpoint of the draft model, with the same vocabulary. It takes memory beside the model",
    )


def choose_step_sizes(engine: EngineConfig, options: Mapping[str, int | None]) -> dict[str, int]:
    """Return STEP_SIZES for the model of `engine`: those in `options`, and fitting values where they are None, the
    largest chunk where load chooses it."""
    seqs, tokens = (options[name] for name in STEP_SIZES)
    default_seqs, default_tokens = _runtime_sizes(engine)
    if chooses_chunk(engine, tokens):
        default_tokens = LARGEST_CHUNK
    return {
        "max_num_seqs": seqs or min(default_seqs, tokens or default_tokens),
        "max_num_batched_tokens": tokens or max(default_tokens, seqs or 0),
    }


def chooses_chunk(engine: EngineConfig, tokens: int | None) -> bool:
    """Return whether the engine chooses its chunks by load: where no option gives its `tokens`, if its runtime can."""
    try:
        return tokens is None and choose_runtime(engine).spec.chooses_chunk
    except SluiceError:
        return False


def _runtime_sizes(engine: EngineConfig) -> tuple[int, int]:
    """Return the runtime's sizes; the bundled one's where none can run the model, which the start reports."""
    try:
        return choose_runtime(engine).spec.step_sizes(engine)
    except SluiceError:
        return BUNDLED.default_step_sizes
