"""The KV cache: pages of keys and of values for each layer, and how many fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sluice.engine.arrays import ByteArray
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.runners.torch.step import BLOCK_SIZE
from sluice.errors import SluiceError, invalid


@dataclass(frozen=True, slots=True)
class PageShape:
    """Number and sizes of the heads that a layer keeps of each token."""

    num_heads: int
    key_dim: int
    value_dim: int
    """0 if a value is the first part of its key."""

    @property
    def num_elements(self) -> int:
        """Elements of a block."""
        return self.num_heads * (self.key_dim + self.value_dim) * BLOCK_SIZE


def page_shapes(config: DecoderConfig) -> list[PageShape]:
    """Return the shape of each layer's pages. Latent attention keeps a token's short vector and the rotated part of its
    keys, once for all heads. A convolution keeps half of each input as a key and half as a value."""
    plain = PageShape(config.num_kv_heads, config.head_dim, config.head_dim)
    if config.latent is not None:
        plain = PageShape(1, config.latent.kv_rank + config.head_dim, 0)
    half = config.hidden_size // 2
    convolution = PageShape(1, config.hidden_size - half, half)
    return [convolution if layer.is_convolution else plain for layer in config.layers]


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's cache: keys [num_blocks, num_heads, BLOCK_SIZE, key_dim], values with value_dim."""

    keys: torch.Tensor
    values: torch.Tensor | None
    """None if a value is the first part of its key."""


class PagedKvCache:
    """The pages of all layers."""

    def __init__(self, shapes: Sequence[PageShape], num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises INVALID if there is not so much memory."""
        self.block_bytes = block_bytes(shapes, dtype)
        self.description = f"{dtype} {[(each.num_heads, each.key_dim, each.value_dim) for each in shapes]}"

        def pages(num_heads: int, size: int) -> torch.Tensor:
            return _zeros((num_blocks, num_heads, BLOCK_SIZE, size), dtype, device)

        try:
            self.layers = [
                Pages(
                    pages(each.num_heads, each.key_dim),
                    pages(each.num_heads, each.value_dim) if each.value_dim else None,
                )
                for each in shapes
            ]
        except (RuntimeError, MemoryError, ValueError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise _too_large(num_blocks * self.block_bytes, device, error) from error

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.read_blocks`."""
        for block, content in zip(blocks, contents, strict=True):
            place = 0
            for page in self._pages_of(block):
                torch.from_numpy(content[place : place + len(page)]).copy_(page)
                place += len(page)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.write_blocks`."""
        for block, content in zip(blocks, contents, strict=True):
            place = 0
            for page in self._pages_of(block):
                page.copy_(torch.from_numpy(content[place : place + len(page)]))
                place += len(page)

    def _pages_of(self, block: int) -> list[torch.Tensor]:
        """Return the bytes of a block in each layer, keys and values."""
        both = (each for pages in self.layers for each in (pages.keys, pages.values) if each is not None)
        return [each[block].view(-1).view(torch.uint8) for each in both]


def block_bytes(shapes: Sequence[PageShape], dtype: torch.dtype) -> int:
    """Return the bytes of a block in all layers."""
    return sum(each.num_elements for each in shapes) * int(dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On the CPU the system commits a page when it is first written, as numpy's zeros are: a large cache
    costs only the memory that is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _too_large(size_bytes: int, device: torch.device, error: Exception) -> SluiceError:
    reason = str(error).partition("\n")[0]
    return invalid("num_blocks", f"the KV cache of {size_bytes} bytes cannot be allocated on {device}: {reason}")
