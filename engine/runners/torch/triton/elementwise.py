"""Operations between the products of matrices, each one pass over memory: norms with the residual stream, gates of
MLPs, rotation of queries and keys, and rows in 8-bit floats, each with a scale of its own. All compute in float32."""

import torch
import triton
import triton.language as tl

from sluice.engine.runners.torch.fp8 import LARGEST, SMALLEST_SCALE, TYPE
from sluice.engine.runners.torch.triton.tiles import padded, row_stride

SILU, GELU, GELU_TANH, RELU, RELU2 = (tl.constexpr(number) for number in range(5))
ACTIVATIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "relu": RELU,
    "relu2": RELU2,
}
"""Activations of `gate`, by their names in `config.json`."""
_VARYING = ["positions", "slots", "num_rows"]
"""Arguments that differ from step to step: another alignment or a number of 1 must not compile the kernel again."""
_GATE_WIDTH = 1024
_NORM_ELEMENTS = 1024
"""Elements that a program normalizes, if a row has less."""
_ROTATED_HEADS = 8
"""Heads that one program rotates."""


# -- norms


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, update, weight, out, eps, num_rows, stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    """Normalize some rows. Those of a token, HEADS of them, are one piece of memory."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    places = (rows // HEADS * stride + rows % HEADS * SIZE)[:, None] + columns[None, :]
    content = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    flat = rows[:, None] * SIZE + columns[None, :]
    if HAS_UPDATE:
        content += tl.load(update + flat, mask=mask, other=0.0).to(tl.float32)
        rounded = content.to(x.dtype.element_ty)
        tl.store(x + places, rounded, mask=mask)
        content = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(content * content, 1) / SIZE + eps)
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32) + OFFSET
    tl.store(out + flat, (content * factor[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    update: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale the last axis of x to a root mean square of 1, then by weight + `offset`. x is [num_tokens, size], or
    [num_tokens, num_heads, size], and may be a part of longer rows. With an `update`, contiguous, x + update is written
    into x first. Returns a contiguous tensor, `out` if it is given."""
    size, num_heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    num_rows, width = x.shape[0] * num_heads, triton.next_power_of_2(size)
    rows = max(1, _NORM_ELEMENTS // width)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x, update, weight, out, eps, num_rows, x.stride(0), num_heads, size, width, rows, offset, update is not None,
        num_warps=min(16, max(4, width // 512)), enable_fp_fusion=True,
    )  # fmt: skip
    return out


# -- gates


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        y = x * tl.sigmoid(x)
    elif ACTIVATION == GELU:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == RELU:
        y = tl.maximum(x, 0.0)
    else:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def _gate(
    gates, ups, out, gate_stride, up_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < SIZE
    gate = tl.load(gates + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (_activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=mask)


def gate(gates: torch.Tensor, ups: torch.Tensor, activation: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return activation(gates) * ups, both [num_tokens, size]; they may be the halves of one product. `activation` is a
    key of ACTIVATIONS."""
    num_tokens, size = gates.shape
    if out is None:
        out = torch.empty_like(gates, memory_format=torch.contiguous_format)
    width = min(_GATE_WIDTH, triton.next_power_of_2(size))
    _gate[num_tokens, triton.cdiv(size, width)](
        gates, ups, out, gates.stride(0), ups.stride(0), size, width, ACTIVATIONS[activation], enable_fp_fusion=True
    )
    return out


# -- rotation


@triton.jit
def _turn(
    source, norm, cosines, sines, table_row, heads, eps, target, cells,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr,
    OFFSET: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Normalize some heads of a token's features if there is a norm, rotate them, and write each to its cell. Component
    i rotates with component i + HALF; those from 2 * HALF on keep their place and value."""
    halves, rest = tl.arange(0, HALF_WIDTH), 2 * HALF + tl.arange(0, REST_WIDTH)
    is_half = (heads < HEADS)[:, None] & (halves < HALF)[None, :]
    is_rest = (heads < HEADS)[:, None] & (rest < DIM)[None, :]
    places = source + heads[:, None] * DIM
    first = tl.load(places + halves[None, :], mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(places + HALF + halves[None, :], mask=is_half, other=0.0).to(tl.float32)
    others = tl.zeros([1, 1], tl.float32)
    if 2 * HALF < DIM:
        others = tl.load(places + rest[None, :], mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(others * others, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        first *= factor * _scale(norm, halves, halves < HALF, OFFSET)
        second *= factor * _scale(norm, HALF + halves, halves < HALF, OFFSET)
        others *= factor * _scale(norm, rest, rest < DIM, OFFSET)
    cosine = tl.load(cosines + table_row * HALF + halves, mask=halves < HALF, other=0.0)[None, :]
    sine = tl.load(sines + table_row * HALF + halves, mask=halves < HALF, other=0.0)[None, :]
    places = target + cells[:, None] * DIM
    element = target.dtype.element_ty
    tl.store(places + halves[None, :], (first * cosine - second * sine).to(element), mask=is_half)
    tl.store(places + HALF + halves[None, :], (second * cosine + first * sine).to(element), mask=is_half)
    if 2 * HALF < DIM:
        tl.store(places + rest[None, :], others.to(element), mask=is_rest)


@triton.jit
def _scale(norm, columns, mask, OFFSET: tl.constexpr):
    return (tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32) + OFFSET)[None, :]


@triton.jit(do_not_specialize_on_alignment=_VARYING)
def _rotate(
    queries, keys, values, out, key_pages, value_pages, slots, cosines, sines, positions, query_norm, key_norm, eps,
    query_stride, key_stride, value_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, OFFSET: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of a token: queries go to `out`; keys, and values as they are, into the token's slot."""
    QUERY_TILES: tl.constexpr = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_row = tl.load(positions + token).to(tl.int64) if HAS_POSITIONS else token
    if part < QUERY_TILES:
        heads = part * HEADS_TILE + tl.arange(0, HEADS_TILE)
        _turn(
            queries + token * query_stride, query_norm, cosines, sines, table_row, heads, eps, out,
            token * HEADS + heads, HEADS, DIM, HALF, HALF_WIDTH, REST_WIDTH, OFFSET, HAS_NORMS,
        )  # fmt: skip
    elif KV_HEADS > 0:
        heads = (part - QUERY_TILES) * HEADS_TILE + tl.arange(0, HEADS_TILE)
        slot = tl.load(slots + token).to(tl.int64)
        cells = (slot // BLOCK * KV_HEADS + heads) * BLOCK + slot % BLOCK
        _turn(
            keys + token * key_stride, key_norm, cosines, sines, table_row, heads, eps, key_pages, cells,
            KV_HEADS, DIM, HALF, HALF_WIDTH, REST_WIDTH, OFFSET, HAS_NORMS,
        )  # fmt: skip
        dims = tl.arange(0, VALUE_WIDTH)
        mask = (heads < KV_HEADS)[:, None] & (dims < VALUE_DIM)[None, :]
        content = tl.load(values + token * value_stride + heads[:, None] * VALUE_DIM + dims[None, :], mask=mask)
        places = value_pages + cells[:, None] * VALUE_DIM + dims[None, :]
        tl.store(places, content.to(value_pages.dtype.element_ty), mask=mask)


def rotate(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate heads [num_tokens, num_heads, head_dim], whose rows may be parts of longer ones. `cosines` and `sines` are
    contiguous float32 tables, [any, rotary_dim / 2], times the rope's amplitude. Token i reads row `positions[i]`, or
    row i without positions. With a `norm`, the weight [head_dim] of an RMS norm, heads are normalized first. Returns a
    contiguous tensor, `out` if it is given."""
    num_tokens, num_heads, _ = heads.shape
    if out is None:
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    tile = min(_ROTATED_HEADS, triton.next_power_of_2(num_heads))
    _rotate[num_tokens, triton.cdiv(num_heads, tile)](
        heads, None, None, out, None, None, None, cosines, sines, positions, norm, None, eps, row_stride(heads), 0, 0,
        num_heads, 0, tile, 1, *_rotated_sizes(heads, cosines), 0, 1, norm_offset, norm is not None,
        positions is not None, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def rotate_and_store(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slots: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries [num_tokens, num_heads, head_dim] and keys [num_tokens, num_kv_heads, head_dim] as `rotate` does,
    `norms` being the weights of queries' and keys' norm, and write keys and values into pages as `attention.store`
    does. Returns the queries."""
    num_tokens, num_heads, _ = queries.shape
    num_kv_heads, block_size = key_pages.shape[1:3]
    value_dim = value_pages.shape[3]
    if out is None:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    tile = min(_ROTATED_HEADS, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    query_norm, key_norm = norms or (None, None)
    _rotate[num_tokens, triton.cdiv(num_heads, tile) + triton.cdiv(num_kv_heads, tile)](
        queries, keys, values, out, key_pages, value_pages, slots, cosines, sines, positions, query_norm, key_norm, eps,
        row_stride(queries), row_stride(keys), row_stride(values),
        num_heads, num_kv_heads, tile, block_size, *_rotated_sizes(queries, cosines), value_dim, padded(value_dim),
        norm_offset, norms is not None, positions is not None, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _rotated_sizes(heads: torch.Tensor, cosines: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the kernel's DIM, HALF, HALF_WIDTH and REST_WIDTH."""
    head_dim, half = heads.shape[2], cosines.shape[1]
    widths = (triton.next_power_of_2(max(1, size)) for size in (half, head_dim - 2 * half))
    return head_dim, half, *widths


@triton.jit
def _quantize_rows(
    x, codes, scales, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = columns < SIZE
    content = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(content), 0) / LARGEST, SMALLEST)
    # The largest is that of the numbers; a row of NaN gets a scale of NaN, whatever its codes are.
    scale = tl.where(tl.max((content != content).to(tl.int32), 0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    tl.store(codes + row * SIZE + columns, (content / scale).to(codes.dtype.element_ty), mask=mask)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [num_rows, size] of x, and the scales [num_rows, 1] that they are times. Rows of x may be parts
    of longer ones."""
    num_rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty(num_rows, size, dtype=TYPE, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(size)
    _quantize_rows[(num_rows,)](
        x, codes, scales, x.stride(0), size, width, LARGEST, SMALLEST_SCALE, num_warps=min(16, max(4, width // 512))
    )
    return codes, scales
