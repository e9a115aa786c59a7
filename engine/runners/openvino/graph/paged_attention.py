"""Attention over a KV cache in blocks: the paged-attention node, and a variant with softcapped scores.

`_PagedAttentionExtension` is private in OpenVINO's Python API and its inputs change between releases, hence the pinned
version range and the check in `paged_attention`.

The node does not support a softcap (Gemma 2). `capped_attention` still uses it to write keys and values into their
blocks, but computes the attention itself, one sequence after the other; each layer copies the blocks of the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.config.decoder_config import DecoderConfig
from engine.runners.openvino.graph.nodes import floating, ints32, ints64, scaled, softcapped
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


@dataclass(frozen=True, slots=True)
class Heads:
    """Number and size of the heads of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def paged_attention(
    query: ov.Node,
    key: ov.Node,
    value: ov.Node,
    caches: tuple[ov.Node, ov.Node],
    paged: PagedInputs,
    heads: Heads,
    *,
    scale: float,
    window: int | None = None,
) -> ov.Node:
    """Write this step's `key` and `value` into the caches, then attend causally over each sequence's blocks.

    query [num_tokens, num_heads * head_dim], key and value [num_tokens, num_kv_heads * head_dim]; returns the query's
    shape. Scores are multiplied by `scale`. With a `window`, a token attends to that many: itself and those just
    before it. Raises SluiceError UNAVAILABLE for an OpenVINO whose node is different.
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
        "sinks": ops.constant(np.zeros((0, 0, 0, 0), np.float32)),
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
    info["k_head_size"] = info["v_head_size"] = heads.head_dim
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


@dataclass(frozen=True, slots=True)
class Scores:
    """Options of the scores: products times `scale`, squeezed into ± `softcap`, over the last `window` tokens."""

    scale: float
    softcap: float
    window: int | None


def check_cache_dtype(config: DecoderConfig, kv_cache_dtype: str) -> None:
    """Check the cache type. Raises SluiceError INVALID if softcapped attention cannot read blocks of that type."""
    if config.attention_softcap is not None and kv_cache_dtype == "u8":
        raise invalid(
            "kv_cache_dtype",
            "kv_cache_dtype must be auto for this model, got u8: its attn_logit_softcapping needs a cache of floats",
        )


def capped_attention(
    query: ov.Node,
    key: ov.Node,
    value: ov.Node,
    caches: tuple[ov.Node, ov.Node],
    paged: PagedInputs,
    heads: Heads,
    scores: Scores,
) -> ov.Node:
    """Attend as `paged_attention` does, with softcapped scores. The caches must be of floats (`check_cache_dtype`)."""
    # The node is used to write: each token attends only to itself, which costs almost nothing.
    written = paged_attention(query, key, value, caches, paged, heads, scale=1.0, window=1)
    blocks = ops.add(paged.block_indices, _zero_after(written))
    keys, values = (ops.convert(ops.gather(cache, blocks, ints64([0])), "f32") for cache in caches)
    return _over_sequences(query, keys, values, paged, heads, scores)


def _zero_after(x: ov.Node) -> ov.Node:
    """Return a zero, [1] i32, that cannot be computed before x."""
    first = ops.slice(x, ints64([0, 0]), ints64([1, 1]), ints64([1, 1]), ints64([0, 1]))
    return ops.reshape(ops.convert(ops.clamp(first, 0.0, 0.0), "i32"), ints64([1]), False)


def _over_sequences(
    query: ov.Node, keys: ov.Node, values: ov.Node, paged: PagedInputs, heads: Heads, scores: Scores
) -> ov.Node:
    """Loop over the sequences, each of which fills its rows of the result."""
    features = heads.num_heads * heads.head_dim
    blocks_shape = ov.PartialShape([-1, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim])
    index = ops.parameter([], ov.Type.i32)
    all_queries = ops.parameter(ov.PartialShape([-1, features]), ov.Type.f32)
    all_keys, all_values = (ops.parameter(blocks_shape, ov.Type.f32) for _ in range(2))
    token_begins, block_begins, past_lens = (ops.parameter(ov.PartialShape([-1]), ov.Type.i32) for _ in range(3))
    result = ops.parameter(ov.PartialShape([-1, features]), ov.Type.f32)

    begin, end = _at(token_begins, index, 0), _at(token_begins, index, 1)
    first_block, last_block = _at(block_begins, index, 0), _at(block_begins, index, 1)
    attended = _attend(
        _rows(all_queries, begin, end),
        _rows(all_keys, first_block, last_block),
        _rows(all_values, first_block, last_block),
        _at(past_lens, index, 0),
        heads,
        scores,
    )
    filled = ops.scatter_update(result, _between(begin, end), attended, ints32([0]))
    go_on = ops.constant(np.array(True))
    parameters = [index, all_queries, all_keys, all_values, token_begins, block_begins, past_lens, result]
    body = ov.Model([ops.result(go_on), ops.result(filled)], parameters, "sequence")

    num_sequences = ops.squeeze(ops.shape_of(paged.past_lens, "i32"), ints64([0]))
    loop = ops.loop(num_sequences, ops.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([0, 0])
    outer = [query, keys, values, paged.subsequence_begins, paged.block_indices_begins, paged.past_lens]
    for parameter, node in zip(parameters[1:-1], outer, strict=True):
        loop.set_invariant_input(parameter, _output(node))
    loop.set_merged_input(result, _output(query), filled.output(0))
    return loop.get_iter_value(filled.output(0), -1)


def _attend(query: ov.Node, keys: ov.Node, values: ov.Node, past_len: ov.Node, heads: Heads, scores: Scores) -> ov.Node:
    """Attend in one sequence: query [num_new, features], keys, values [num_blocks, num_kv_heads, block, head_dim]."""
    kv, group, size = heads.num_kv_heads, heads.num_heads // heads.num_kv_heads, heads.head_dim
    split = ops.transpose(ops.reshape(query, ints64([0, kv, group, size]), True), ints64([1, 2, 0, 3]))
    # Queries that share a key head are rows of one matrix, so that keys and values are read once.
    rows = ops.reshape(split, ints64([kv, -1, size]), False)
    products = ops.matmul(rows, _by_head(keys, heads), False, True)
    visible = _visible(query, keys, past_len, scores.window)
    by_token = ops.concat([ints32([kv, group]), _size(query), ops.multiply(_size(keys), ints32([BLOCK_SIZE]))], 0)
    capped = ops.reshape(softcapped(scaled(products, scores.scale), scores.softcap), by_token, False)
    weights = ops.softmax(ops.select(visible, capped, floating(_LOWEST)), -1)
    mixed = ops.matmul(_like(weights, products), _by_head(_written(values, query, past_len), heads), False, False)
    attended = ops.transpose(_like(mixed, split), ints64([2, 0, 1, 3]))
    return ops.reshape(attended, ints64([0, heads.num_heads * size]), True)


def _like(x: ov.Node, shaped: ov.Node) -> ov.Node:
    return ops.reshape(x, ops.shape_of(shaped, "i32"), False)


def _by_head(blocks: ov.Node, heads: Heads) -> ov.Node:
    """Reshape the blocks of one sequence to [num_kv_heads, num_slots, head_dim]."""
    ordered = ops.transpose(blocks, ints64([1, 0, 2, 3]))
    return ops.reshape(ordered, ints64([heads.num_kv_heads, -1, heads.head_dim]), False)


def _written(blocks: ov.Node, query: ov.Node, past_len: ov.Node) -> ov.Node:
    """Zero the slots behind the sequence's last token, which may hold NaN of another sequence: a weight of 0 times NaN
    is NaN."""
    slots = ops.reshape(_slots(blocks), ints64([-1, 1, BLOCK_SIZE, 1]), False)
    return ops.select(ops.less(slots, ops.add(past_len, _size(query))), blocks, floating(0))


def _visible(query: ov.Node, keys: ov.Node, past_len: ov.Node, window: int | None) -> ov.Node:
    """Return which slots each new token attends to, [num_new, num_slots]."""
    slots = _slots(keys)
    places = ops.unsqueeze(ops.add(_count_up(_size(query)), past_len), ints64([1]))
    visible = ops.less_equal(slots, places)
    if window is None:
        return visible
    return ops.logical_and(visible, ops.greater(slots, ops.subtract(places, ints32([window]))))


def _slots(blocks: ov.Node) -> ov.Node:
    """Return the numbers of all slots of one sequence's blocks, [num_slots]."""
    return _count_up(ops.multiply(_size(blocks), ints32([BLOCK_SIZE])))


def _count_up(length: ov.Node) -> ov.Node:
    return _between(ints32([0]), length)


def _size(x: ov.Node) -> ov.Node:
    """Return the length of the first axis, [1] i32."""
    return ops.gather(ops.shape_of(x, "i32"), ints32([0]), ints32([0]))


def _at(vector: ov.Node, index: ov.Node, offset: int) -> ov.Node:
    """Return the element at `index + offset`, [1]."""
    position = ops.reshape(ops.add(index, ops.constant(np.int32(offset))), ints64([1]), False)
    return ops.gather(vector, position, ints32([0]))


def _rows(x: ov.Node, begin: ov.Node, end: ov.Node) -> ov.Node:
    """Return x[begin:end]. In bf16, a slice would take three times as long, because the plugin converts all of x."""
    return ops.gather(x, _between(begin, end), ints32([0]))


def _between(begin: ov.Node, end: ov.Node) -> ov.Node:
    return ops.range(_scalar(begin), _scalar(end), ops.constant(np.int32(1)), "i32")


def _scalar(x: ov.Node) -> ov.Node:
    return ops.squeeze(x, ints64([0]))


def _output(x: ov.Node) -> ov.Output:
    return x.output(0) if isinstance(x, ov.Node) else x
