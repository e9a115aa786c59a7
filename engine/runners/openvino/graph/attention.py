"""The paged-attention node: attention over a KV cache that lives in blocks, which our planner hands out.

`_PagedAttentionExtension` is private in OpenVINO's Python API and its inputs change between
releases, hence the pinned version range and the check in `paged_attention`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from sluice.errors import ErrorCode, SluiceError

TESTED_VERSION = "2026.4"
BLOCK_SIZE = 32
"""Tokens a block holds: fixed by the CPU plugin."""


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Graph inputs that say where each sequence's tokens and blocks are; see `StepBatch` for the shapes."""

    past_lens: ov.Node
    subsequence_begins: ov.Node
    block_indices: ov.Node
    block_indices_begins: ov.Node
    max_context_len: ov.Node


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's attention is divided."""

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

    query [num_tokens, num_heads * head_dim], key and value [num_tokens, num_kv_heads * head_dim];
    returns the query's shape. Scores are multiplied by `scale`; with a `window`, a token attends to
    so many: itself and those just before it. Raises SluiceError(UNAVAILABLE) on an OpenVINO whose node is different.
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
    _describe_heads(node, heads)
    return node.output(0)


def _empty(dtype: type[np.generic]) -> ov.Node:
    """An input left out: the feature it belongs to is off."""
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


def _describe_heads(node: ov.Node, heads: Heads) -> None:
    """The plugin shapes the caches [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim] from these."""
    info: Any = node.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = heads.num_kv_heads
    info["k_head_size"] = info["v_head_size"] = heads.head_dim
