"""Attention over a KV cache in pages.

A layer's pages are two tensors: keys [num_blocks, num_kv_heads, block_size, head_dim] and values [num_blocks,
num_kv_heads, block_size, value_dim]. The tokens of a block and head are one contiguous piece of memory. In a latent
cache (MLA), a token's value is the first part of its key, and there are no pages of values.

Query heads that share a key head are rows of the same tile, so that each key is read once for all of them. The grids
depend on shapes and on nothing that a tensor holds: a CUDA graph can hold every launch.
"""

import torch
import triton

from sluice.engine.runners.torch.triton import attention_kernels as kernels
from sluice.engine.runners.torch.triton.tiles import Sizes, decode_tiles, padded, prefill_tiles, row_stride

_LOG2E = 1.4426950408889634
_STORED_HEADS = 8
"""Heads whose keys and values one program stores."""


def store(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Write keys [num_tokens, num_kv_heads, head_dim] and values [num_tokens, num_kv_heads, value_dim] into pages.
    Token i's slot is `slots[i]`: its block's number times block_size, plus its place in the block. Rows may be parts of
    longer ones, such as a product of several projections. A latent cache has neither values nor their pages."""
    num_kv_heads, block_size, head_dim = key_pages.shape[1:]
    value_dim = 1 if value_pages is None else value_pages.shape[3]
    heads_tile = min(triton.next_power_of_2(num_kv_heads), _STORED_HEADS)
    kernels.store[keys.shape[0], triton.cdiv(num_kv_heads, heads_tile)](
        keys, values, key_pages, value_pages, slots, row_stride(keys),
        0 if values is None else row_stride(values),
        num_kv_heads, heads_tile, block_size, head_dim, padded(head_dim), value_dim, padded(value_dim),
        enable_fp_fusion=True,
    )  # fmt: skip


def decode(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    block_tables: torch.Tensor,
    past_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent_dim: int | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new token of each sequence to it and to those before it, which are all in the pages.

    queries [num_seqs, num_heads, head_dim], whose rows may be parts of longer ones; block_tables [num_seqs,
    most_blocks] int32, of which what is past a sequence's end is not read; past_lens [num_seqs] int32, without the new
    token. Scores are products times `scale`, squeezed into ± `softcap`, over the last `window` tokens. `sinks`
    [num_heads] are scores that take their share and give nothing. With `latent_dim` the first so many elements of a key
    are its value, and value_pages is None. A sequence's tokens are divided among `num_splits` programs, a power of 2,
    by default as many as fill the device. Returns [num_seqs, num_heads, value_dim], `out` if it is given.
    """
    num_seqs, sizes = queries.shape[0], _sizes_of(queries, key_pages, value_pages, latent_dim)
    tiles = decode_tiles(sizes, num_seqs, block_tables.shape[1] * key_pages.shape[2], queries.device, num_splits)
    if out is None:
        out = queries.new_empty(num_seqs, sizes.num_heads, sizes.value_dim)
    parts, peaks, totals = _room_for_splits(queries, num_seqs * sizes.num_heads, tiles.splits, sizes.value_dim)
    kernels.decode[num_seqs, sizes.num_kv_heads * triton.cdiv(sizes.group, tiles.rows), tiles.splits](
        queries, key_pages, value_pages, block_tables, past_lens, sinks, out, parts, peaks, totals,
        _factor(scale, softcap), row_stride(queries), block_tables.stride(0),
        sizes.num_kv_heads, sizes.group, tiles.rows, key_pages.shape[2], sizes.head_dim, *sizes.key_parts,
        sizes.value_dim, padded(sizes.value_dim), tiles.tokens, tiles.splits, window or 0, softcap or 0.0,
        sinks is not None, num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if tiles.splits > 1:
        kernels.combine[(num_seqs * sizes.num_heads,)](
            parts, peaks, totals, out, tiles.splits, sizes.value_dim, padded(sizes.value_dim), enable_fp_fusion=True
        )
    return out


def prefill(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    block_tables: torch.Tensor,
    subsequence_begins: torch.Tensor,
    past_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent_dim: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from any number of new tokens of each sequence to each of them and to those before it, which are all in
    the pages. Sequence i has the tokens `subsequence_begins[i]:subsequence_begins[i + 1]` of the queries, [num_tokens,
    num_heads, head_dim]; subsequence_begins is [num_seqs + 1] int32. The rest is as for `decode`. Returns [num_tokens,
    num_heads, value_dim]; of tokens that belong to no sequence nothing is written."""
    num_tokens, num_seqs, sizes = (
        queries.shape[0],
        len(past_lens),
        _sizes_of(queries, key_pages, value_pages, latent_dim),
    )
    tiles = prefill_tiles(sizes, num_tokens, num_seqs, queries.device)
    if out is None:
        out = queries.new_empty(num_tokens, sizes.num_heads, sizes.value_dim)
    kernels.prefill[num_tokens * sizes.group // tiles.rows + num_seqs, sizes.num_kv_heads](
        queries, key_pages, value_pages, block_tables, subsequence_begins, past_lens, sinks, out,
        _factor(scale, softcap), num_seqs, row_stride(queries), block_tables.stride(0),
        sizes.num_kv_heads, sizes.group, tiles.rows, key_pages.shape[2], sizes.head_dim, *sizes.key_parts,
        sizes.value_dim, padded(sizes.value_dim), tiles.tokens, window or 0, softcap or 0.0, sinks is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _factor(scale: float, softcap: float | None) -> float:
    return scale / softcap if softcap else scale * _LOG2E


def _sizes_of(
    queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor | None, latent_dim: int | None
) -> Sizes:
    num_kv_heads, _, head_dim = key_pages.shape[1:]
    value_dim = latent_dim if value_pages is None else value_pages.shape[3]
    if value_dim is None:
        raise ValueError("pages of values or latent_dim must be given")
    return Sizes(queries.shape[1], num_kv_heads, head_dim, value_dim, key_pages.element_size(), value_pages is not None)


def _room_for_splits(
    queries: torch.Tensor, num_rows: int, splits: int, value_dim: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if splits == 1:
        return None, None, None
    float32 = {"dtype": torch.float32}
    parts = queries.new_empty(num_rows, splits, value_dim, **float32)
    return parts, *queries.new_empty(2, num_rows, splits, **float32)
