"""How much fits at once: limits of a batch, an iteration and a sequence, and those that an engine has built in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.delegated.tensorrt_llm.configuration.arguments import Resolution
from engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.errors import invalid

TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""
DEFAULTED = frozenset(
    {"max_batch_size", "max_num_tokens", "max_input_len", "max_beam_width", "kv_cache_config", "scheduler_config"}
)
"""Arguments of which an explicit None means the default."""

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
    block_size = _resolve_block_size(resolution)
    if resolution.config.num_blocks is not None:
        arguments.add("kv_cache_config.max_tokens", resolution.config.num_blocks * block_size, "num_blocks")
    _resolve_parallel_sizes(resolution)
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


def _resolve_block_size(resolution: Resolution) -> int:
    """Return tokens a block: an engine has them built in."""
    built = _plugins(resolution.folder).get("tokens_per_block")
    if isinstance(built, int):
        resolution.arguments.drop(_BLOCK_SIZE)
        return built
    resolution.arguments.add_default(_BLOCK_SIZE, TOKENS_PER_BLOCK)
    return resolution.arguments.whole_number(_BLOCK_SIZE)


def _resolve_parallel_sizes(resolution: Resolution) -> None:
    """Converted checkpoints and engines have these sizes built in: only 1, or the same, may be given."""
    arguments = resolution.arguments
    for name, built in resolution.folder.parallel_sizes.items():
        given = arguments.get(name)
        if given not in (None, 1, built):
            made_for = f"what {resolution.folder.path} was made for"
            raise arguments.refusal(name, f"must be 1 or {built}, {made_for}; got {given}")
        if given is not None:
            arguments.replace(name, built)


def _bounds_of_checkpoint(resolution: Resolution) -> tuple[int, int, int, int]:
    arguments, most = resolution.arguments, resolution.folder.max_model_len
    given = arguments.get("max_seq_len")
    max_seq_len = most if given is None else arguments.whole_number("max_seq_len")
    if max_seq_len > most:
        raise arguments.refusal("max_seq_len", f"must be 1 to {most}, what the model was made for; got {max_seq_len}")
    arguments.add_default("max_seq_len", max_seq_len, "the model")
    arguments.add_default("max_input_len", max_seq_len, "the model")
    arguments.add_default("max_beam_width", 1)
    max_num_tokens = arguments.whole_number("max_num_tokens")
    if max_num_tokens < max_seq_len:
        arguments.add_default(_CHUNKED, True, "max_num_batched_tokens")
    max_batch_size, max_beam_width = map(arguments.whole_number, ("max_batch_size", "max_beam_width"))
    return max_batch_size, max_num_tokens, max_seq_len, max_beam_width


def _bounds_of_engine(resolution: Resolution) -> tuple[int, int, int, int]:
    """TensorRT-LLM clamps two of them to what the engine was compiled for, and overwrites the others with it."""
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
    _resolve_chunking(resolution)
    width = build.get("max_beam_width")
    width = width if isinstance(width, int) else 1
    return arguments.get("max_batch_size"), arguments.get("max_num_tokens"), max_seq_len, width


def _resolve_chunking(resolution: Resolution) -> None:
    """Only an engine with paged context FMHA can prefill in chunks."""
    arguments, folder = resolution.arguments, resolution.folder
    can_chunk = _plugins(folder).get("use_paged_context_fmha")
    if can_chunk is False and arguments.get(_CHUNKED):
        raise invalid(
            arguments.origin(_CHUNKED),
            f"{folder.path} cannot prefill in pieces: it was compiled without paged context FMHA; compile it with "
            "trtllm-build --use_paged_context_fmha enable, or leave enable_chunked_prefill",
        )
    if can_chunk and arguments.get("max_num_tokens") < folder.max_model_len:
        arguments.add_default(_CHUNKED, True, "max_num_batched_tokens")


def _plugins(folder: LlmFolder) -> Mapping[str, Any]:
    plugins = (folder.build_config or {}).get("plugin_config")
    return plugins if isinstance(plugins, Mapping) else {}
