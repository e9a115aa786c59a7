"""How many KV blocks an engine has: what the configuration says, or what fits into memory."""

import logging

from sluice.engine.config import EngineConfig
from sluice.errors import invalid

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 256 << 20
DEFAULT_REQUESTS = 4
DEFAULT_MAX_FRACTION = 0.5
"""The default size is DEFAULT_BYTES or room for DEFAULT_REQUESTS of full length, whichever is larger, up to this
fraction of the free memory."""


def check_cache_limits(engine: EngineConfig) -> None:
    """Check the configured size. Raises SluiceError INVALID if no model and no machine could satisfy it."""
    if engine.num_blocks is not None and engine.num_blocks < 1:
        raise invalid("num_blocks", f"num_blocks must be at least 1, got {engine.num_blocks}")
    fraction = engine.kv_cache_memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise invalid(
            "kv_cache_memory_fraction", f"kv_cache_memory_fraction must be over 0 and at most 1, got {fraction}"
        )


def choose_num_blocks(
    engine: EngineConfig,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    free_bytes: int,
    default_fraction: float | None = None,
) -> int:
    """Choose the number of blocks of `block_size` tokens: `num_blocks` if given, else what fits into the configured
    memory, or the default: `default_fraction` of the free memory, if the device has no other use for it.

    More blocks than all running requests need are no waste, because they keep prefixes for later ones. A cache smaller
    than one sequence of the full context is allowed; a request that cannot fit is rejected at submit. Raises
    SluiceError INVALID if not even one block fits.
    """
    if engine.num_blocks is not None:
        _warn_if_large(engine.num_blocks * block_bytes, free_bytes)
        return engine.num_blocks
    full_length = -(-max_model_len // block_size) * block_bytes
    default = max(DEFAULT_BYTES, DEFAULT_REQUESTS * full_length) if default_fraction is None else free_bytes
    share = default_fraction or DEFAULT_MAX_FRACTION
    param, memory_bytes = _cache_memory(engine, default, share, free_bytes)
    if memory_bytes < block_bytes:
        raise invalid(
            param,
            f"the KV cache would have {memory_bytes} bytes ({_origin(engine, share, free_bytes)}), "
            f"less than one block of {block_size} tokens of this model takes ({block_bytes} bytes)",
        )
    _warn_if_large(memory_bytes, free_bytes)
    return memory_bytes // block_bytes


def _cache_memory(engine: EngineConfig, default: int, share: float, free_bytes: int) -> tuple[str, int]:
    """Return the field to change if the cache is too small, and the size in bytes."""
    if engine.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes", engine.kv_cache_memory_bytes
    if engine.kv_cache_memory_fraction is not None:
        return "kv_cache_memory_fraction", int(engine.kv_cache_memory_fraction * free_bytes)
    return "kv_cache_memory_bytes", min(default, int(share * free_bytes))


def _origin(engine: EngineConfig, share: float, free_bytes: int) -> str:
    if engine.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    return f"{engine.kv_cache_memory_fraction or share:g} of the {free_bytes} bytes that are free with the model loaded"


def _warn_if_large(size_bytes: int, free_bytes: int) -> None:
    if size_bytes > free_bytes:
        logger.warning(
            "the KV cache may grow to %d MiB, and only %d MiB are free: the system may end the engine when it fills",
            size_bytes >> 20,
            free_bytes >> 20,
        )
