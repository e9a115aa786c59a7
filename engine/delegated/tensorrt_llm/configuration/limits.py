"""How much fits at once: limits of a batch, an iteration and a sequence, and those that an engine has built in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes
from engine.delegated.tensorrt_llm.folder import ModelFolder
from sluice.errors import invalid

TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""

DEFAULTED = frozenset(
    {"max_batch_size", "max_num_tokens", "max_input_len", "max_beam_width", "kv_cache_config", "scheduler_config"}
)
"""Arguments of which an explicit None means the default."""

_CACHE = "kv_cache_config"
_CHUNKED = "enable_chunked_prefill"
_AT_MOST = ("max_batch_size", "max_num_tokens")
_BUILT_IN = ("max_seq_len", "max_input_len", "max_beam_width")


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds in the end, and notes on what was asked for beyond it."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    notes: tuple[str, ...] = ()


def tokens_per_block(wishes: Wishes, folder: ModelFolder) -> int:
    """Of an engine what it was compiled with, else what is asked for."""
    built = _plugins(folder).get("tokens_per_block") if folder.build_config is not None else None
    if isinstance(built, int):
        wishes.drop(f"{_CACHE}.tokens_per_block")
        return built
    wishes.add(f"{_CACHE}.tokens_per_block", TOKENS_PER_BLOCK, "the adapter", Strength.DEFAULT)
    return _whole(wishes, f"{_CACHE}.tokens_per_block")


def _whole(wishes: Wishes, target: str) -> int:
    """What is wished for, which a file may have written in another way."""
    value = wishes.get(target)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        origin = wishes.origin(target)
        raise invalid(origin, f"{origin} must be a whole number of 1 or more, got {value!r}")
    return value


def resolve(wishes: Wishes, folder: ModelFolder, *, is_engine: bool) -> Limits:
    """Complete the limits. Raises SluiceError INVALID for those that the model cannot keep to."""
    if is_engine:
        _take_cache_dtype(wishes)
    limits = _of_model(wishes, folder) if folder.build_config is None else _of_engine(wishes, folder)
    if limits.max_num_tokens < limits.max_batch_size:
        raise invalid(
            "max_num_tokens",
            f"max_num_tokens must be at least max_batch_size ({limits.max_batch_size}), so that every running request "
            f"gets its token in each iteration, got {limits.max_num_tokens}",
        )
    return limits


def _of_model(wishes: Wishes, folder: ModelFolder) -> Limits:
    max_seq_len = _max_seq_len(wishes, folder)
    wishes.add("max_seq_len", max_seq_len, "the model", Strength.DEFAULT)
    wishes.add("max_input_len", max_seq_len, "the model", Strength.DEFAULT)
    wishes.add("max_beam_width", 1, "the adapter", Strength.DEFAULT)
    max_num_tokens = _whole(wishes, "max_num_tokens")
    if max_num_tokens < max_seq_len:
        wishes.add(_CHUNKED, True, "max_num_batched_tokens", Strength.DEFAULT)
    return Limits(_whole(wishes, "max_batch_size"), max_num_tokens, max_seq_len, _whole(wishes, "max_beam_width"))


def _max_seq_len(wishes: Wishes, folder: ModelFolder) -> int:
    asked = _whole(wishes, "max_seq_len") if wishes.get("max_seq_len") is not None else folder.max_model_len
    if asked > folder.max_model_len:
        origin = wishes.origin("max_seq_len")
        most = folder.max_model_len
        raise invalid(origin, f"{origin} must be 1 to {most}, what the model was made for; got {asked}")
    return asked


def _of_engine(wishes: Wishes, folder: ModelFolder) -> Limits:
    """TensorRT-LLM clamps two of them to what the engine was compiled for, and overwrites the others with it."""
    build = folder.build_config or {}
    notes = []
    for name in (*_AT_MOST, *_BUILT_IN):
        built = build.get(name)
        if not isinstance(built, int) or name not in wishes:
            continue
        asked = built if wishes.get(name) is None else _whole(wishes, name)
        if asked > built and wishes.is_asked(name):
            notes.append(f"{wishes.origin(name)} {asked} is more than the engine was compiled for; {built} holds")
        if name in _AT_MOST:
            wishes.replace(name, min(asked, built))
    max_seq_len = min(int(wishes.get("max_seq_len") or folder.max_model_len), folder.max_model_len)
    wishes.drop(*_BUILT_IN)
    _check_chunks(wishes, folder)
    width = build.get("max_beam_width")
    return Limits(
        wishes.get("max_batch_size"),
        wishes.get("max_num_tokens"),
        max_seq_len,
        width if isinstance(width, int) else 1,
        tuple(notes),
    )


def _take_cache_dtype(wishes: Wishes) -> None:
    target = f"{_CACHE}.dtype"
    if wishes.get(target, "auto") != "auto":
        origin = wishes.origin(target)
        raise invalid(origin, f"{origin} must be auto with a compiled engine, which has the type built in")
    wishes.drop(target)


def _check_chunks(wishes: Wishes, folder: ModelFolder) -> None:
    """Only an engine with paged context FMHA can prefill in pieces."""
    chunks = _plugins(folder).get("use_paged_context_fmha")
    if chunks is False and wishes.get(_CHUNKED):
        raise invalid(
            wishes.origin(_CHUNKED),
            f"{folder.path} cannot prefill in pieces: it was compiled without paged context FMHA; compile it with "
            "trtllm-build --use_paged_context_fmha enable, or leave enable_chunked_prefill",
        )
    if chunks and wishes.get("max_num_tokens") < folder.max_model_len:
        wishes.add(_CHUNKED, True, "max_num_batched_tokens", Strength.DEFAULT)


def _plugins(folder: ModelFolder) -> Mapping[str, Any]:
    plugins = (folder.build_config or {}).get("plugin_config")
    return plugins if isinstance(plugins, Mapping) else {}


def take_parallel_sizes(wishes: Wishes, folder: ModelFolder) -> None:
    """Those of a converted checkpoint or an engine are built in: only 1, or the same, may be asked for."""
    for name, built in folder.parallel_sizes.items():
        asked = wishes.get(name)
        if asked not in (None, 1, built):
            origin = wishes.origin(name)
            raise invalid(origin, f"{origin} must be 1 or {built}, what {folder.path} was made for; got {asked}")
        if asked is not None:
            wishes.replace(name, built)
