"""Attention over a KV cache in blocks: the paged-attention node, and a variant with softcapped scores.

`_PagedAttentionExtension` is private in OpenVINO's Python API and its inputs change between releases, hence the pinned
version range and the check in `paged_attention`.

The node does not support a softcap (Gemma 2). `capped_attention` still uses it to write keys and values into their
blocks, but computes the attention itself; each layer copies the blocks of the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.kernels import Heads, Scores
from sluice.engine.runners.openvino.graph.nodes import floating, ints32, ints64, scaled, softcapped
from sluice.errors import ErrorCode, SluiceError, invalid

TESTED_VERSION = "2026.4"
BLOCK_SIZE = 32
"""Tokens in a block, as the CPU plugin requires."""


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Graph inputs that locate each sequence's tokens and blocks; see `StepBatch` for the shapes."""

    past_lens: ov.Node
    subsequence_begins: ov.Node
    block_indices: ov.Node
    block_indices_begins: ov.Node
    max_context_len: ov.Node


Caches = tuple[ov.Node, ov.Node]
"""Key and value cache of a layer."""


def paged_attention(
    query: ov.Node,
    key: ov.Node,
    value: ov.Node,
    caches: Caches,
    paged: PagedInputs,
    heads: Heads,
    *,
    scale: float,
    window: int | None = None,
    sinks: ov.Node | None = None,
) -> ov.Node:
    """Write this step's `key` and `value` into the caches, then attend causally over each sequence's blocks.

    query [num_tokens, num_heads * head_dim], key and value [num_tokens, num_kv_heads * head_dim], or value_dim for the
    value; returns [num_tokens, num_heads * (value_dim or head_dim)]. Scores are multiplied by `scale`. With a `window`,
    a token attends to that many: itself and those just before it. `sinks` [1, num_heads, 1, 1] are scores that take
    their share of each head's attention and give nothing.
    Raises SluiceError UNAVAILABLE for an OpenVINO whose node is different.
    """
    no_ints, no_floats = _empty(np.int32), _empty(np.float32)
    zero = ops.constant(np.int32(0))
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "past_lens": paged.past_lens,
        "subsequence_begins": paged.subsequence_begins,
        "block_indices": paged.block_indices,
        "block_indices_begins": paged.block_indices_begins,
        "scale": ops.constant(np.float32(scale)),
        "sliding_window": ops.constant(np.int32(window or 0)),
        "alibi_slopes": no_floats,
        "max_context_len": paged.max_context_len,
        "score_aggregation_window": no_ints,
        "rotated_block_indices": no_ints,
        "rotation_deltas": no_ints,
        "rotation_trig_lut": no_floats,
        "xattention_threshold": no_floats,
        "xattention_block_size": zero,
        "xattention_stride": zero,
        "sinks": ops.constant(np.zeros((0, 0, 0, 0), np.float32)) if sinks is None else sinks,
        "adaptive_rkv_start_size": zero,
        "adaptive_rkv_evictable_sizes": no_ints,
        "adaptive_rkv_diversity_block_set_indices": no_ints,
        "adaptive_rkv_diversity_block_set_indices_begins": no_ints,
        "token_type_ids": no_ints,
        "qq_bias": _empty(np.uint8),
        "qq_bias_begins": no_ints,
    }
    node = _make_node(list(inputs.values()))
    # The sizes from which the plugin shapes the caches [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim].
    info: Any = node.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = heads.num_kv_heads
    info["k_head_size"] = heads.head_dim
    info["v_head_size"] = heads.value_dim or heads.head_dim
    return node.output(0)


def _empty(dtype: type[np.generic]) -> ov.Node:
    """Return an empty input, which turns its feature off."""
    return ops.constant(np.zeros(0, dtype))


def _make_node(inputs: list[ov.Node]) -> ov.Node:
    try:
        from openvino.op import _PagedAttentionExtension

        return _PagedAttentionExtension([node.output(0) for node in inputs])
    except (ImportError, RuntimeError) as error:
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"the paged attention of openvino {ov.__version__} is not the one Sluice knows "
            f"({len(inputs)} inputs); install openvino {TESTED_VERSION}",
        ) from error


_LOWEST = float(np.finfo(np.float32).min)


def check_cache_dtype(config: DecoderConfig, kv_cache_dtype: str) -> None:
    """Check the cache type. Raises SluiceError INVALID if the graph reads blocks itself and cannot read that type."""
    if config.attention_softcap is not None and kv_cache_dtype == "u8":
        raise invalid(
            "kv_cache_dtype",
            "kv_cache_dtype must be auto for this model, got u8: its attn_logit_softcapping needs a cache of floats",
        )
    if config.convolution_size and kv_cache_dtype == "u8":
        raise invalid(
            "kv_cache_dtype",
            "kv_cache_dtype must be auto for this model, got u8: its convolutions need a cache of floats",
        )


def capped_attention(
    query: ov.Node,
    key: ov.Node,
    value: ov.Node,
    caches: Caches,
    paged: PagedInputs,
    heads: Heads,
    scores: Scores,
) -> ov.Node:
    """Attend as `paged_attention` does, with softcapped scores. The caches must be of floats (`check_cache_dtype`)."""
    # The node is used to write: each token attends only to itself, which costs almost nothing.
    written = paged_attention(query, key, value, caches, paged, heads, scale=1.0, window=1)
    blocks = ops.add(paged.block_indices, zero_after(written))
    return _attend(query, caches, blocks, paged, heads, scores)


def zero_after(x: ov.Node) -> ov.Node:
    """Return a zero, [1] i32, that cannot be computed before x."""
    first = ops.slice(x, ints64([0, 0]), ints64([1, 1]), ints64([1, 1]), ints64([0, 1]))
    return ops.reshape(ops.convert(ops.clamp(first, 0.0, 0.0), "i32"), ints64([1]), False)


def _attend(
    query: ov.Node, caches: Caches, blocks: ov.Node, paged: PagedInputs, heads: Heads, scores: Scores
) -> ov.Node:
    """Attend in all sequences at once, each with rows and slots up to those of the longest.

    A loop over the sequences would need no padding, but OpenVINO 2026.4 computes wrong ones: its CPU plugin lets the
    loop's inputs share memory with other tensors while the loop still reads them, so that the first steps of a new size
    were wrong or NaN.
    """
    kv, group, size = heads.num_kv_heads, heads.num_heads // heads.num_kv_heads, heads.head_dim
    one = ints32([1])
    row_begins, row_ends = _begins_and_ends(paged.subsequence_begins)
    num_new = ops.subtract(row_ends, row_begins)  # [num_seqs, 1]
    rows = ops.unsqueeze(_count_up(_largest(num_new)), ints64([0]))  # [1, max_new]
    padded = ops.minimum(ops.add(row_begins, rows), ops.subtract(row_ends, one))  # [num_seqs, max_new]
    by_row = ops.reshape(ops.gather(query, padded, ints32([0])), ints64([0, 0, kv, group, size]), True)
    # Queries that share a key head are rows of one matrix, so that keys and values are read once.
    queries = ops.reshape(ops.transpose(by_row, ints64([0, 2, 3, 1, 4])), ints64([0, kv, -1, size]), True)

    table_begins, table_ends = _begins_and_ends(paged.block_indices_begins)
    places = ops.unsqueeze(_count_up(_largest(ops.subtract(table_ends, table_begins))), ints64([0]))
    tables = ops.gather(
        blocks, ops.minimum(ops.add(table_begins, places), ops.subtract(table_ends, one)), ints32([0])
    )  # [num_seqs, max_blocks]
    past_lens = ops.reshape(paged.past_lens, ints64([-1, 1]), False)
    slots = ops.unsqueeze(_count_up(ops.multiply(_axis(tables, 1), ints32([BLOCK_SIZE]))), ints64([0]))
    keys, values = (_by_head(cache, tables, heads) for cache in caches)
    # What is not written may hold NaN of another sequence, and a weight of 0 times NaN is NaN.
    is_written = ops.less(slots, ops.add(past_lens, num_new))  # [num_seqs, num_slots]
    values = ops.select(_unsqueezed(is_written, 1, 3), values, floating(0))

    positions = ops.unsqueeze(ops.add(past_lens, rows), ints64([2]))  # [num_seqs, max_new, 1]
    visible = ops.less_equal(_unsqueezed(slots, 1), positions)
    if scores.window is not None:
        visible = ops.logical_and(
            visible, ops.greater(_unsqueezed(slots, 1), ops.subtract(positions, ints32([scores.window])))
        )
    products = ops.matmul(queries, keys, False, True)  # [num_seqs, kv, group * max_new, num_slots]
    capped = softcapped(scaled(products, scores.scale), scores.softcap)
    by_group = ops.concat([_axis(tables, 0), ints32([kv, group]), _axis(rows, 1), _axis(slots, 1)], 0)
    weights = ops.softmax(
        ops.select(_unsqueezed(visible, 1, 2), ops.reshape(capped, by_group, False), floating(_LOWEST)), -1
    )
    mixed = ops.matmul(ops.reshape(weights, ops.shape_of(products, "i32"), False), values, False, False)
    split = ops.concat([_axis(tables, 0), ints32([kv, group]), _axis(rows, 1), ints32([size])], 0)
    attended = ops.transpose(ops.reshape(mixed, split, False), ints64([0, 3, 1, 2, 4]))
    by_place = ops.reshape(attended, ints64([-1, heads.num_heads * size]), False)  # [num_seqs * max_new, features]

    # Each token's sequence is the number of those that end at it or before.
    tokens = ops.unsqueeze(_count_up(_axis(query, 0)), ints64([0]))
    before = ops.convert(ops.less_equal(row_ends, tokens), "i32")  # [num_seqs, num_tokens]
    sequence = ops.reduce_sum(before, ints32([0]), keep_dims=False)
    begins = ops.gather(ops.reshape(row_begins, ints64([-1]), False), sequence, ints32([0]))
    within = ops.subtract(ops.reshape(tokens, ints64([-1]), False), begins)
    return ops.gather(by_place, ops.add(ops.multiply(sequence, _axis(rows, 1)), within), ints32([0]))


def _by_head(cache: ov.Node, tables: ov.Node, heads: Heads) -> ov.Node:
    """Copy the blocks in `tables` [num_seqs, max_blocks] to [num_seqs, num_kv_heads, num_slots, head_dim]."""
    copied = ops.transpose(ops.gather(cache, tables, ints64([0])), ints64([0, 2, 1, 3, 4]))
    return ops.convert(ops.reshape(copied, ints64([0, heads.num_kv_heads, -1, heads.head_dim]), True), "f32")


def _begins_and_ends(begins: ov.Node) -> tuple[ov.Node, ov.Node]:
    """Return where each sequence begins and ends, [num_seqs, 1] each, from [num_seqs + 1]."""
    last = ops.subtract(_axis(begins, 0), ints32([1]))
    first, second = _between(ints32([0]), last), _between(ints32([1]), ops.add(last, ints32([1])))
    taken = (ops.gather(begins, each, ints32([0])) for each in (first, second))
    starts, ends = (ops.unsqueeze(each, ints64([1])) for each in taken)
    return starts, ends


def _largest(lengths: ov.Node) -> ov.Node:
    """Return the largest, [1]."""
    return ops.reshape(ops.reduce_max(lengths, ints32([0, 1]), keep_dims=False), ints64([1]), False)


def _unsqueezed(x: ov.Node, *axes: int) -> ov.Node:
    return ops.unsqueeze(x, ints64(list(axes)))


def _axis(x: ov.Node, axis: int) -> ov.Node:
    """Return the length of an axis, [1] i32."""
    return ops.gather(ops.shape_of(x, "i32"), ints32([axis]), ints32([0]))


def _count_up(length: ov.Node) -> ov.Node:
    return _between(ints32([0]), length)


def _between(begin: ov.Node, end: ov.Node) -> ov.Node:
    return ops.range(_scalar(begin), _scalar(end), ops.constant(np.int32(1)), "i32")


def _scalar(x: ov.Node) -> ov.Node:
    return ops.squeeze(x, ints64([0]))
