"""The KV cache: the size of a block, the number of blocks, and their memory."""

import logging
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import openvino as ov

from engine.config import EngineConfig
from engine.runners.base import ByteArray
from engine.runners.openvino.graph.model import is_cache
from engine.runners.openvino.graph.paged_attention import BLOCK_SIZE
from engine.runners.openvino.weights.shared import shared_tensor
from sluice.errors import invalid

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 256 << 20
DEFAULT_REQUESTS = 4
DEFAULT_MAX_FRACTION = 0.5
"""The default size is DEFAULT_BYTES or room for DEFAULT_REQUESTS of full length, whichever is larger, up to this
fraction of the free memory."""


@dataclass(frozen=True, slots=True)
class _CacheInput:
    """Keys or values of one layer in the compiler's layout. A quantized cache includes its scales."""

    name: str
    kind: ov.Type
    block_shape: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        element_bytes: int = self.kind.size
        return math.prod(self.block_shape) * element_bytes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache inputs of a compiled model."""

    inputs: tuple[_CacheInput, ...]

    @classmethod
    def of(cls, compiled: ov.CompiledModel) -> "CacheLayout":
        ports = [port for port in compiled.inputs if is_cache(port.get_any_name())]
        return cls(tuple(_CacheInput(p.get_any_name(), p.element_type, _block_shape(p)) for p in ports))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of BLOCK_SIZE tokens in all layers."""
        return sum(cache.block_bytes for cache in self.inputs)

    @property
    def description(self) -> str:
        """The types and shapes of all inputs, as text."""
        return " ".join(f"{each.name}:{each.kind.get_type_name()}{list(each.block_shape)}" for each in self.inputs)

    @property
    def dtype(self) -> str:
        """Name of the type of cached keys and values."""
        name: str = self.inputs[0].kind.get_type_name()
        return name


def _block_shape(port: ov.ConstOutput) -> tuple[int, ...]:
    return tuple(axis.get_length() for axis in list(port.partial_shape)[1:])


def check_cache_limits(engine: EngineConfig) -> None:
    """Check the configured size. Raises SluiceError INVALID if no model and no machine could satisfy it."""
    if engine.num_blocks is not None and engine.num_blocks < 1:
        raise invalid("num_blocks", f"num_blocks must be at least 1, got {engine.num_blocks}")
    fraction = engine.kv_cache_memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise invalid(
            "kv_cache_memory_fraction", f"kv_cache_memory_fraction must be over 0 and at most 1, got {fraction}"
        )


def choose_num_blocks(engine: EngineConfig, block_bytes: int, max_model_len: int, free_bytes: int) -> int:
    """Choose the number of blocks: `num_blocks` if given, else what fits into the configured or the default memory.

    More blocks than all running requests need are no waste, because they keep prefixes for later ones. A cache smaller
    than one sequence of the full context is allowed; a request that cannot fit is rejected at submit. Raises
    SluiceError INVALID if not even one block fits.
    """
    if engine.num_blocks is not None:
        _warn_if_large(engine.num_blocks * block_bytes, free_bytes)
        return engine.num_blocks
    param, memory_bytes = _cache_memory(engine, block_bytes, max_model_len, free_bytes)
    if memory_bytes < block_bytes:
        raise invalid(
            param,
            f"the KV cache would have {memory_bytes} bytes ({_origin(engine, free_bytes)}), "
            f"less than one block of {BLOCK_SIZE} tokens of this model takes ({block_bytes} bytes)",
        )
    _warn_if_large(memory_bytes, free_bytes)
    return memory_bytes // block_bytes


def _cache_memory(engine: EngineConfig, block_bytes: int, max_model_len: int, free_bytes: int) -> tuple[str, int]:
    """Return the field to change if the cache is too small, and the size in bytes."""
    if engine.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes", engine.kv_cache_memory_bytes
    if engine.kv_cache_memory_fraction is not None:
        return "kv_cache_memory_fraction", int(engine.kv_cache_memory_fraction * free_bytes)
    full_length = -(-max_model_len // BLOCK_SIZE) * block_bytes
    default = max(DEFAULT_BYTES, DEFAULT_REQUESTS * full_length)
    return "kv_cache_memory_bytes", min(default, int(DEFAULT_MAX_FRACTION * free_bytes))


def _origin(engine: EngineConfig, free_bytes: int) -> str:
    if engine.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    share = engine.kv_cache_memory_fraction or DEFAULT_MAX_FRACTION
    return f"{share:g} of the {free_bytes} bytes that are free with the model loaded"


def _warn_if_large(size_bytes: int, free_bytes: int) -> None:
    if size_bytes > free_bytes:
        logger.warning(
            "the KV cache may grow to %d MiB, and only %d MiB are free: the system may end the engine when it fills",
            size_bytes >> 20,
            free_bytes >> 20,
        )


class KvCache:
    """The tensors of the cache inputs, all in one anonymous map. They are valid as long as this object. The system
    commits a page when it is first written, so a large cache costs only the memory that is used."""

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        self._memory = _anonymous_map(layout.block_bytes * num_blocks)
        self.tensors: dict[str, ov.Tensor] = {}
        self._pieces: list[tuple[slice, ByteArray]] = []
        """For each input, its place in the content of a block, and its memory as [num_blocks, bytes]."""
        offset = place = 0
        for cache in layout.inputs:
            size_bytes = cache.block_bytes * num_blocks
            shape = (num_blocks, *cache.block_shape)
            self.tensors[cache.name] = shared_tensor(self._memory, offset, size_bytes, cache.kind, shape)
            rows = np.frombuffer(self._memory, np.uint8, size_bytes, offset).reshape(num_blocks, cache.block_bytes)
            self._pieces.append((slice(place, place + cache.block_bytes), rows))
            offset, place = offset + size_bytes, place + cache.block_bytes

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """Copy each block to the array in its place of `contents`, each [block_bytes]."""
        for block, content in zip(blocks, contents, strict=True):
            for place, rows in self._pieces:
                content[place] = rows[block]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """Copy to each block the array in its place of `contents`."""
        for block, content in zip(blocks, contents, strict=True):
            for place, rows in self._pieces:
                rows[block] = content[place]


def _anonymous_map(size_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise invalid("num_blocks", f"the KV cache of {size_bytes} bytes cannot be allocated: {error}") from error
    # Attention jumps from block to block: with huge pages, a step with 64 sequences takes 3-7 % less.
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
