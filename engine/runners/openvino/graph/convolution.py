"""Short convolutions over a sequence's tokens, whose inputs are kept in the KV cache: half of each as a key and half as
a value."""

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.opset15 import bitwise_right_shift

from sluice.engine.models.kernels import Heads
from sluice.engine.runners.openvino.graph.nodes import TO_THE_END, floating, ints32, ints64, part
from sluice.engine.runners.openvino.graph.paged_attention import (
    BLOCK_SIZE,
    Caches,
    PagedInputs,
    paged_attention,
    zero_after,
)

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1


@dataclass(frozen=True, slots=True)
class EarlierToken:
    """The place of the token that is some positions before each token of a step, all [num_tokens, 1]."""

    block: ov.Node
    slot: ov.Node
    exists: ov.Node


def earlier_tokens(paged: PagedInputs, position_ids: ov.Node, convolution_size: int) -> list[EarlierToken]:
    """Return the places of the tokens 1, 2, … positions before each, as many as the convolution sees."""
    zero = ints32([0])
    rows = ops.range(ops.constant(np.int32(0)), _length(position_ids), ops.constant(np.int32(1)), "i32")
    ends = part(paged.subsequence_begins, 1, TO_THE_END, 0)
    is_after = ops.less_equal(ops.unsqueeze(ends, ints64([0])), ops.unsqueeze(rows, ints64([1])))
    sequence = ops.reduce_sum(ops.convert(is_after, "i32"), ints64([1]), False)
    tables = ops.gather(paged.block_indices_begins, sequence, zero)
    found = []
    for distance in range(1, convolution_size):
        position = ops.subtract(position_ids, ints32([distance]))
        inside = ops.maximum(position, zero)
        # In integers: a position of some thousands is not exact in bf16.
        number = bitwise_right_shift(inside, ints32([_BLOCK_BITS]))
        block = ops.gather(paged.block_indices, ops.add(tables, number), zero)
        slot = ops.subtract(inside, ops.multiply(number, ints32([BLOCK_SIZE])))
        exists = ops.greater_equal(position, zero)
        found.append(EarlierToken(*(ops.unsqueeze(x, ints64([1])) for x in (block, slot, exists))))
    return found


def _length(x: ov.Node) -> ov.Node:
    return ops.gather(ops.shape_of(x, "i32"), ops.constant(np.int32(0)), ops.constant(np.int32(0)))


def convolve(
    x: ov.Node, taps: ov.Node, caches: Caches, paged: PagedInputs, heads: Heads, earlier: list[EarlierToken]
) -> ov.Node:
    """See `Kernels.convolve`. `heads` hold half of a token's x each."""
    total = ops.multiply(x, _tap(taps, len(earlier)))
    stored = _Stored.write(x, caches, paged, heads)
    for distance, token in enumerate(earlier, 1):
        total = ops.add(total, ops.multiply(stored.read(token), _tap(taps, len(earlier) - distance)))
    return total


def _tap(taps: ov.Node, number: int) -> ov.Node:
    return ops.reshape(part(taps, number, number + 1, 2), ints64([1, -1]), False)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The inputs of a layer's convolution in the KV cache, this step's included."""

    caches: Caches
    heads: Heads
    zero: ov.Node
    """A zero that is not computed before this step's inputs are written."""

    @classmethod
    def write(cls, inputs: ov.Node, caches: Caches, paged: PagedInputs, heads: Heads) -> "_Stored":
        half = heads.num_kv_heads * heads.head_dim
        key, value = part(inputs, 0, half, 1), part(inputs, half, TO_THE_END, 1)
        # The node of attention writes; each token attends to itself alone, which costs almost nothing.
        query = ops.tile(key, ints64([1, heads.num_heads // heads.num_kv_heads]))
        written = paged_attention(query, key, value, caches, paged, heads, scale=1.0, window=1)
        return cls(caches, heads, zero_after(written))

    def read(self, token: EarlierToken) -> ov.Node:
        """Return the inputs of earlier tokens, [num_tokens, hidden_size]; zeros where there is none."""
        count, size = self.heads.num_kv_heads, self.heads.head_dim
        heads = ops.constant(np.arange(count, dtype=np.int32)[None])
        rows = ops.add(ops.multiply(ops.add(token.block, self.zero), ints32([count])), heads)
        rows = ops.add(ops.multiply(rows, ints32([BLOCK_SIZE])), token.slot)  # [num_tokens, num_heads]
        halves = []
        for cache in self.caches:
            flat = ops.reshape(cache, ints64([-1, size]), False)
            taken = ops.convert(ops.gather(flat, rows, ints32([0])), "f32")
            halves.append(ops.reshape(taken, ints64([0, count * size]), True))
        # What is not written may hold NaN of another sequence, and a weight of 0 times NaN is NaN.
        return ops.select(token.exists, ops.concat(halves, 1), floating(0))
