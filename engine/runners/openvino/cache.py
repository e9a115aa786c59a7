"""The KV cache: how many blocks, and the memory under them."""

import math
import mmap

import openvino as ov

from engine.config import EngineConfig
from engine.errors import invalid
from engine.runners.openvino.attention import BLOCK_SIZE
from engine.runners.openvino.graph import is_cache
from engine.runners.openvino.memory import shared_tensor
from engine.runners.openvino.model_config import ModelConfig


def block_bytes(config: ModelConfig, kind: ov.Type) -> int:
    """Memory one block takes: K and V of BLOCK_SIZE tokens in every layer."""
    element_bytes: int = kind.size
    return config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim * element_bytes


def choose_num_blocks(engine: EngineConfig, size_bytes: int) -> int:
    """`num_blocks` where given, else as many of `size_bytes` as `kv_cache_memory_bytes` holds.

    A cache smaller than one sequence of the full context is allowed: what cannot fit is refused at
    submit, one request at a time. Raises SluiceError(INVALID) where not even one block fits.
    """
    if engine.num_blocks is not None:
        if engine.num_blocks < 1:
            raise invalid("num_blocks", f"num_blocks must be at least 1, got {engine.num_blocks}")
        return engine.num_blocks
    memory_bytes = 256 << 20 if engine.kv_cache_memory_bytes is None else engine.kv_cache_memory_bytes
    num_blocks = memory_bytes // size_bytes
    if num_blocks < 1:
        raise invalid(
            "kv_cache_memory_bytes",
            f"kv_cache_memory_bytes is {memory_bytes}, "
            f"less than one block of {BLOCK_SIZE} tokens of this model takes ({size_bytes} bytes)",
        )
    return num_blocks


class KvCache:
    """A tensor for each cache input, in the type and layout the compiler chose, all in one anonymous map.

    The system commits a page when it is first written, so a large cache costs only what is used.
    The tensors are valid while the KvCache lives.
    """

    def __init__(self, compiled: ov.CompiledModel, num_blocks: int) -> None:
        ports = [port for port in compiled.inputs if is_cache(port.get_any_name())]
        shapes = [[num_blocks, *(axis.get_length() for axis in list(port.partial_shape)[1:])] for port in ports]
        sizes = [math.prod(shape) * port.element_type.size for port, shape in zip(ports, shapes, strict=True)]
        self._memory = _anonymous_map(sum(sizes))
        self.tensors: dict[str, ov.Tensor] = {}
        offset = 0
        for port, shape, size_bytes in zip(ports, shapes, sizes, strict=True):
            tensor = shared_tensor(self._memory, offset, size_bytes, port.element_type, shape)
            self.tensors[port.get_any_name()] = tensor
            offset += size_bytes


def _anonymous_map(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise invalid("num_blocks", f"the KV cache of {size_bytes} bytes cannot be allocated: {error}") from error
