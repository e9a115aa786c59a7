"""The KV cache: the size of a block, the number of blocks, and their memory."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import openvino as ov

from sluice.engine.arrays import ByteArray
from sluice.engine.runners.openvino.graph.model import is_cache
from sluice.engine.runners.openvino.weights.compression import shared_tensor
from sluice.errors import invalid


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
