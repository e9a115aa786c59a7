"""Sizes of the tiles that kernels of attention work on.

They are chosen for Hopper: on it no kernel in float16 or bfloat16 spills registers. Other devices have less shared
memory, and get smaller tiles.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton

_HOPPER = (132, 227 * 1024)
"""Multiprocessors, and bytes of shared memory that a program may have. For tensors on the CPU, whose kernels are only
interpreted, or compiled for another machine."""
_SMALLEST = 16
"""The least number of rows, columns or elements of a product."""
_BYTES_ON_THE_WAY = 40 << 10
"""Bytes of keys and values that a program of decode loads at once."""
_DECODE_PROGRAMS = 4
"""Programs of decode for each multiprocessor: these many run at the same time."""
_MOST_SPLITS = 32
_MOST_STAGES = 3
_MOST_SUMS = 128 * 256
"""Elements of the sums that a program keeps in its registers."""
_OTHER_BYTES = 1024
"""Shared memory of a program beside queries, keys and values."""
_PREFILL_ROWS = 128
_SHORT_PREFILL_ROWS = 64
"""Rows where programs of 128 rows would not fill the device, or would have rows without a token."""
_FLOAT32_ROWS, _FLOAT32_TOKENS = 32, 16
"""Products of float32 are made of three of its parts, which take room."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes of a launch: rows of queries and cached tokens that a program multiplies at once."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    """Tiles of cached tokens that a program has at the same time, all but one on their way."""
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    element_bytes: int
    has_values: bool = True
    """False if a value is the first part of its key."""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_parts(self) -> tuple[int, int, int]:
        """Elements of a key that are multiplied first, and the sizes of the tiles' axes of these and of the rest. Heads
        of 192 are multiplied in 128 and 64, not padded to 256."""
        main = _power_of_2_below(self.head_dim) if self.has_values else self.value_dim
        rest = self.head_dim - main
        if self.has_values and (min(main, rest) < _SMALLEST or rest != padded(rest)):
            return self.head_dim, padded(self.head_dim), _SMALLEST
        return main, padded(main), padded(rest)

    @property
    def key_width(self) -> int:
        """Elements of a key in its tiles."""
        main, main_width, rest_width = self.key_parts
        return main_width + (rest_width if main < self.head_dim else 0)

    @property
    def widest(self) -> int:
        """Elements of the longer of a key and a value in their tiles."""
        return max(self.key_width, padded(self.value_dim))

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of a token's head in their tiles."""
        return (self.key_width + (padded(self.value_dim) if self.has_values else 0)) * self.element_bytes

    @property
    def is_float32(self) -> bool:
        return self.element_bytes == 4


def padded(size: int) -> int:
    """Return the size of a tile's axis that holds `size` elements."""
    return max(_SMALLEST, _next_power_of_2(size))


def row_stride(heads: torch.Tensor) -> int:
    """Return the distance of the rows of heads [any, num_heads, size], each of which is one piece of memory."""
    stride, head_stride, element_stride = map(int, heads.stride())
    if element_stride != 1 or (head_stride != heads.shape[2] and heads.shape[1] > 1):
        raise ValueError(f"a row of heads must be contiguous, got strides {heads.stride()} of {tuple(heads.shape)}")
    return stride


def decode_tiles(
    sizes: Sizes, num_seqs: int, most_tokens: int, device: torch.device, splits: int | None = None
) -> Tiles:
    """Return the tiles for one new token of each sequence, of which none has more than `most_tokens`. `splits` is the
    number of programs that share a sequence, by default as many as fill the device."""
    num_processors, memory = _machine(device)
    tokens = min(64, max(_SMALLEST, _power_of_2_below(_BYTES_ON_THE_WAY // sizes.token_bytes)))
    tiles = _fitted(sizes, min(_PREFILL_ROWS, padded(sizes.group)), tokens, memory)
    if splits is None:
        num_programs = num_seqs * sizes.num_kv_heads * triton.cdiv(sizes.group, tiles.rows)
        most = _next_power_of_2(triton.cdiv(most_tokens, tiles.tokens))
        splits = min(_MOST_SPLITS, most, _power_of_2_below(_DECODE_PROGRAMS * num_processors // num_programs))
    return replace(tiles, splits=splits)


def prefill_tiles(sizes: Sizes, num_tokens: int, num_seqs: int, device: torch.device) -> Tiles:
    """Return the tiles for several new tokens of each sequence, `num_tokens` in all."""
    num_processors, memory = _machine(device)
    if sizes.is_float32:
        return _fitted(sizes, _FLOAT32_ROWS, _FLOAT32_TOKENS, memory)
    num_rows = num_tokens * sizes.group
    fills_device = num_rows * sizes.num_kv_heads >= 2 * num_processors * _PREFILL_ROWS
    rows = _PREFILL_ROWS if fills_device and num_rows >= num_seqs * _PREFILL_ROWS else _SHORT_PREFILL_ROWS
    tokens = 64 if sizes.token_bytes <= 768 else 32
    return _fitted(sizes, rows, tokens, memory)


def _fitted(sizes: Sizes, rows: int, tokens: int, memory: int) -> Tiles:
    """Return tiles that fit into a program's registers and memory: fewer rows if sums or queries took too much of it,
    then as many stages as have room beside them, and fewer tokens rather than fewer than two stages."""
    row_bytes = sizes.key_width * sizes.element_bytes
    most_sums = _MOST_SUMS if sizes.has_values else _MOST_SUMS // 2  # keys that are values stay in registers too
    while rows > _SMALLEST and (rows * padded(sizes.value_dim) > most_sums or rows * row_bytes > memory // 2):
        rows //= 2
    left = memory - rows * row_bytes - _OTHER_BYTES
    while tokens > _SMALLEST and left < tokens * sizes.token_bytes:
        tokens //= 2
    num_stages = min(_MOST_STAGES, 1 + max(0, left // (tokens * sizes.token_bytes)))
    return Tiles(rows, tokens, 8 if rows * sizes.widest > 64 * 128 else 4, num_stages)


def _next_power_of_2(number: int) -> int:
    return int(triton.next_power_of_2(number))


def _power_of_2_below(number: int) -> int:
    """Return the largest power of 2 up to `number`, or 1."""
    return 1 << (max(number, 1).bit_length() - 1)


@cache
def _machine(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return _HOPPER
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
