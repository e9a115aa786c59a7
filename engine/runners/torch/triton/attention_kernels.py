"""The kernels that `attention` launches. Tensors are as described there."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("tf32x3")
"""Precision of float32 products: three TF32 products of their parts, exact to a bit or two."""
_VARYING = ["tables", "begins", "past_lens", "slots", "num_seqs", "table_stride"]
"""Arguments that differ from step to step: another alignment or a number of 1 must not compile the kernel again."""


@triton.jit(do_not_specialize_on_alignment=_VARYING)
def store(
    keys, values, key_pages, value_pages, slots, key_stride, value_stride,
    KV_HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write some heads of a token's key and value into its slot."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    slot = tl.load(slots + token).to(tl.int64)
    cells = (slot // BLOCK * KV_HEADS + heads) * BLOCK + slot % BLOCK
    _copy(keys + token * key_stride, key_pages, heads, cells, KV_HEADS, DIM, KEY_WIDTH)
    if values is not None:
        _copy(values + token * value_stride, value_pages, heads, cells, KV_HEADS, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def _copy(source, pages, heads, cells, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Copy heads, each `SIZE` elements, from one token's features to their cells."""
    dims = tl.arange(0, WIDTH)
    mask = (heads < KV_HEADS)[:, None] & (dims < SIZE)[None, :]
    content = tl.load(source + heads[:, None] * SIZE + dims[None, :], mask=mask)
    tl.store(pages + cells[:, None] * SIZE + dims[None, :], content.to(pages.dtype.element_ty), mask=mask)


@triton.jit
def _load_cells(
    pages, cells, exists, DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Load [tile, WIDTH] from cells of DIM elements each, with zeros where a cell does not exist and past SIZE."""
    dims = tl.arange(0, WIDTH)
    places = pages + cells[:, None] * DIM + dims[None, :]
    if MASKED and SIZE < WIDTH:
        content = tl.load(places, mask=exists[:, None] & (dims < SIZE)[None, :], other=0.0)
    elif MASKED:
        content = tl.load(places, mask=exists[:, None], other=0.0)
    elif SIZE < WIDTH:
        content = tl.load(places, mask=(dims < SIZE)[None, :], other=0.0)
    else:
        content = tl.load(places)
    return content


@triton.jit
def _take_tile(
    query, query_rest, acc, peak, total, key_pages, value_pages, table, offsets, exists, visible, head, factor,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, MAIN_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Take a tile of cached tokens into the running softmax of some rows. If it is MASKED, `exists` [tile] says which
    may be read, and `visible`, [rows, tile] or [1, tile], which a row sees. `factor` turns products into exponents of
    2, or into parts of SOFTCAP."""
    if MASKED:
        blocks = tl.load(table + offsets // BLOCK, mask=exists, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + offsets // BLOCK).to(tl.int64)
    cells = (blocks * KV_HEADS + head) * BLOCK + offsets % BLOCK
    keys = _load_cells(key_pages, cells, exists, DIM, MAIN, MAIN_WIDTH, MASKED)
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    if MAIN < DIM:
        rest = _load_cells(key_pages + MAIN, cells, exists, DIM, DIM - MAIN, REST_WIDTH, MASKED)
        scores = tl.dot(query_rest, tl.trans(rest), scores, input_precision=PRECISION)
    scores *= factor
    if SOFTCAP > 0:
        scores = (2 * tl.sigmoid(2 * scores) - 1) * (SOFTCAP * LOG2E)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    if value_pages is None:
        values = keys  # of MAIN elements
    else:
        values = _load_cells(value_pages, cells, exists, VALUE_DIM, VALUE_DIM, VALUE_WIDTH, MASKED)
    acc = acc * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return acc, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def _load_query(
    places, is_row, DIM: tl.constexpr, MAIN: tl.constexpr, MAIN_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr
):  # fmt: skip
    """Load rows of queries, in two parts if MAIN is less than DIM."""
    dims = tl.arange(0, MAIN_WIDTH)
    query = tl.load(places[:, None] + dims[None, :], mask=is_row[:, None] & (dims < MAIN)[None, :], other=0.0)
    rest = query
    if MAIN < DIM:
        dims = MAIN + tl.arange(0, REST_WIDTH)
        rest = tl.load(places[:, None] + dims[None, :], mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0)
    return query, rest


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_VARYING)
def decode(
    queries, key_pages, value_pages, tables, past_lens, sinks, out, parts, peaks, totals, factor, query_stride,
    table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, MAIN_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a sequence's tokens, for ROWS of the query heads that share a key head. Writes `out`, or
    with several splits the split's sum, largest exponent and weight."""
    GROUP_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1) // GROUP_TILES, tl.program_id(2)
    length = tl.load(past_lens + seq) + 1
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first // TILE
    num_tiles = tl.cdiv(tl.cdiv(length, TILE) - first_tile, SPLITS)
    begin = first_tile + split * num_tiles
    end = tl.minimum(begin + num_tiles, tl.cdiv(length, TILE))
    rows = tl.program_id(1) % GROUP_TILES * ROWS + tl.arange(0, ROWS)
    is_row, heads = rows < GROUP, head * GROUP + rows
    places = queries + seq * query_stride + heads * DIM
    query, query_rest = _load_query(places, is_row, DIM, MAIN, MAIN_WIDTH, REST_WIDTH)
    acc, total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:
        # The first split alone counts the sinks.
        sink = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2E
        peak, total = tl.where(split == 0, sink, peak), tl.where(split == 0, 1.0, total)
    for index in range(begin, end):
        offsets = index * TILE + tl.arange(0, TILE)
        exists = (offsets < length) & (offsets >= first)
        acc, peak, total = _take_tile(
            query, query_rest, acc, peak, total, key_pages, value_pages, tables + seq * table_stride, offsets, exists,
            exists[None, :], head, factor, KV_HEADS, BLOCK, DIM, MAIN, MAIN_WIDTH, REST_WIDTH, VALUE_DIM, VALUE_WIDTH,
            SOFTCAP, True,
        )  # fmt: skip
    row = seq * KV_HEADS * GROUP + heads
    value_dims = tl.arange(0, VALUE_WIDTH)
    mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLITS == 1:
        result = acc / total[:, None]
        tl.store(out + row[:, None] * VALUE_DIM + value_dims[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        part = row * SPLITS + split
        tl.store(parts + part[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=mask)
        tl.store(peaks + part, peak, mask=is_row)
        tl.store(totals + part, total, mask=is_row)


@triton.jit
def combine(
    parts, peaks, totals, out, SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """Add up the splits of one query head."""
    row, dims, splits = tl.program_id(0).to(tl.int64), tl.arange(0, VALUE_WIDTH), tl.arange(0, SPLITS)
    peak, total = tl.load(peaks + row * SPLITS + splits), tl.load(totals + row * SPLITS + splits)
    # A split without tokens has no largest exponent.
    shares = tl.where(total > 0, tl.exp2(peak - tl.max(peak, 0)), 0.0)
    places = (row * SPLITS + splits)[:, None] * VALUE_DIM + dims[None, :]
    sums = tl.load(parts + places, mask=(dims < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(sums * shares[:, None], 0) / tl.sum(total * shares, 0)
    tl.store(out + row * VALUE_DIM + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _find_sequence(begins, tile, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the sequence that has a tile. Sequence i's first is `begins[i] * GROUP // ROWS + i`, so that each has as
    many as it needs, and some have one too many."""
    low, high = tile * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(begins + middle) * GROUP // ROWS + middle <= tile
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low


@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=_VARYING)
def prefill(
    queries, key_pages, value_pages, tables, begins, past_lens, sinks, out, factor, num_seqs, query_stride,
    table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, MAIN_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS pairs of a new token of one sequence and a query head to all tokens up to that token. The heads
    are those that share a key head, and change faster than the tokens."""
    # Later tokens see more: their programs start first, and short ones fill what is left at the end.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq = _find_sequence(begins, tile, num_seqs, GROUP, ROWS)
    begin, past = tl.load(begins + seq), tl.load(past_lens + seq)
    first_row = (tile - begin * GROUP // ROWS - seq) * ROWS
    num_rows = (tl.load(begins + seq + 1) - begin) * GROUP
    if first_row >= num_rows:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row, tokens, heads = rows < num_rows, rows // GROUP, head * GROUP + rows % GROUP
    row = (begin + tokens).to(tl.int64)
    sources = queries + row * query_stride + heads * DIM
    query, query_rest = _load_query(sources, is_row, DIM, MAIN, MAIN_WIDTH, REST_WIDTH)
    acc, total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:
        peak, total = tl.load(sinks + heads).to(tl.float32) * LOG2E, total + 1.0
    table, positions = tables + seq.to(tl.int64) * table_stride, past + tokens
    first, last = past + first_row // GROUP, past + tl.cdiv(tl.minimum(first_row + ROWS, num_rows), GROUP)
    lowest = tl.maximum(first - WINDOW + 1, 0) // TILE if WINDOW > 0 else 0
    # Without a window the tiles before the first of these tokens need no mask.
    num_whole = lowest if WINDOW > 0 else first // TILE
    for index in range(lowest, num_whole):
        offsets = index * TILE + tl.arange(0, TILE)
        acc, peak, total = _take_tile(
            query, query_rest, acc, peak, total, key_pages, value_pages, table, offsets, offsets, offsets, head, factor,
            KV_HEADS, BLOCK, DIM, MAIN, MAIN_WIDTH, REST_WIDTH, VALUE_DIM, VALUE_WIDTH, SOFTCAP, False,
        )  # fmt: skip
    for index in range(num_whole, tl.cdiv(last, TILE)):
        offsets = index * TILE + tl.arange(0, TILE)
        visible = offsets[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (offsets[None, :] > positions[:, None] - WINDOW)
        acc, peak, total = _take_tile(
            query, query_rest, acc, peak, total, key_pages, value_pages, table, offsets, offsets < last, visible, head,
            factor, KV_HEADS, BLOCK, DIM, MAIN, MAIN_WIDTH, REST_WIDTH, VALUE_DIM, VALUE_WIDTH, SOFTCAP, True,
        )  # fmt: skip
    value_dims = tl.arange(0, VALUE_WIDTH)
    places = (row * KV_HEADS * GROUP + heads)[:, None] * VALUE_DIM + value_dims[None, :]
    mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(out + places, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
