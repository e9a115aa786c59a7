"""How much fits at once: limits of a batch, an iteration and a sequence, and those that an engine has built in."""

from typing import NamedTuple

from sluice.engine.delegated.tensorrt_llm.configuration.arguments import Resolution
from sluice.errors import invalid

TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""
DEFAULTED = frozenset(
    {"max_batch_size", "max_num_tokens", "max_input_len", "max_beam_width", "kv_cache_config", "scheduler_config"}
)
"""Arguments of which an explicit None means the default."""

RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
"""Arguments whose product is the number of GPUs."""

_BLOCK_SIZE = "kv_cache_config.tokens_per_block"
_CACHE_DTYPE = "kv_cache_config.dtype"
_CHUNKED = "enable_chunked_prefill"
_AT_MOST = ("max_batch_size", "max_num_tokens")
_BUILT_IN = ("max_seq_len", "max_input_len", "max_beam_width")


class LlmLimits(NamedTuple):
    """The limits that hold in the end."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    tokens_per_block: int


def resolve_limits(resolution: Resolution) -> LlmLimits:
    """Complete the arguments that bound sizes. Raises SluiceError INVALID for those that the model cannot keep to."""
    arguments, folder = resolution.arguments, resolution.folder
    block_size = folder.plugins.get("tokens_per_block")
    if isinstance(block_size, int):
        arguments.drop(_BLOCK_SIZE)
    else:
        arguments.add_default(_BLOCK_SIZE, TOKENS_PER_BLOCK)
        block_size = arguments.whole_number(_BLOCK_SIZE)
    if resolution.config.num_blocks is not None:
        arguments.add("kv_cache_config.max_tokens", resolution.config.num_blocks * block_size, "num_blocks")
    for name in RANKS:
        if arguments.get(name) is not None:
            arguments.whole_number(name)
    # Converted checkpoints and engines have these built in.
    for name, built in folder.parallel_sizes.items():
        given = arguments.get(name)
        if given not in (None, 1, built):
            raise arguments.refusal(name, f"must be 1 or {built}, what {folder.path} was made for; got {given}")
        if given is not None:
            arguments.replace(name, built)
    if resolution.is_engine:
        if arguments.get(_CACHE_DTYPE, "auto") != "auto":
            raise arguments.refusal(_CACHE_DTYPE, "must be auto with a compiled engine, which has the type built in")
        arguments.drop(_CACHE_DTYPE)
    bounds = _bounds_of_engine if folder.build_config is not None else _bounds_of_checkpoint
    limits = LlmLimits(*bounds(resolution), block_size)
    if limits.max_num_tokens < limits.max_batch_size:
        raise invalid(
            "max_num_tokens",
            f"max_num_tokens must be at least max_batch_size ({limits.max_batch_size}), so that every running request "
            f"gets its token in each iteration, got {limits.max_num_tokens}",
        )
    return limits


def _bounds_of_checkpoint(resolution: Resolution) -> tuple[int, int, int, int]:
    arguments, most = resolution.arguments, resolution.folder.max_model_len
    max_seq_len = most if arguments.get("max_seq_len") is None else arguments.whole_number("max_seq_len")
    if max_seq_len > most:
        raise arguments.refusal("max_seq_len", f"must be 1 to {most}, what the model was made for; got {max_seq_len}")
    for name, value in zip(_BUILT_IN, (max_seq_len, max_seq_len, 1), strict=True):
        arguments.add_default(name, value, "the model")
    max_batch_size, max_num_tokens, width = map(arguments.whole_number, (*_AT_MOST, "max_beam_width"))
    if max_num_tokens < max_seq_len:
        arguments.add_default(_CHUNKED, True, "max_num_batched_tokens")
    return max_batch_size, max_num_tokens, max_seq_len, width


def _bounds_of_engine(resolution: Resolution) -> tuple[int, int, int, int]:
    """TensorRT-LLM clamps two of them to what the engine was compiled for, and overwrites the others with it. Only an
    engine with paged context FMHA can prefill in chunks."""
    arguments, folder = resolution.arguments, resolution.folder
    build = folder.build_config or {}
    for name in (*_AT_MOST, *_BUILT_IN):
        built = build.get(name)
        if not isinstance(built, int) or name not in arguments:
            continue
        given = built if arguments.get(name) is None else arguments.whole_number(name)
        if given > built and arguments.is_given(name):
            beyond = f"{arguments.origin(name)} {given} is more than the engine was compiled for"
            resolution.notes.append(f"{beyond}; {built} holds")
        if name in _AT_MOST:
            arguments.replace(name, min(given, built))
    max_seq_len = min(int(arguments.get("max_seq_len") or folder.max_model_len), folder.max_model_len)
    arguments.drop(*_BUILT_IN)
    can_chunk = folder.plugins.get("use_paged_context_fmha")
    if can_chunk is False and arguments.get(_CHUNKED):
        raise invalid(
            arguments.origin(_CHUNKED),
            f"{folder.path} cannot prefill in pieces: it was compiled without paged context FMHA; compile it with "
            "trtllm-build --use_paged_context_fmha enable, or leave enable_chunked_prefill",
        )
    if can_chunk and arguments.get("max_num_tokens") < folder.max_model_len:
        arguments.add_default(_CHUNKED, True, "max_num_batched_tokens")
    width = build.get("max_beam_width")
    sizes = map(arguments.get, _AT_MOST)
    return *sizes, max_seq_len, width if isinstance(width, int) else 1
