"""Draws tokens from rows of logits by the rule of `sluice.engine.sampling`, without sorting them.

Each filter keeps the tokens that weigh at least as much as the lightest that it keeps, so each is a threshold. The bits
of floats that are not negative rise as they do: a threshold is found from its highest bits to its lowest, two in each
pass over the row, as the largest that still keeps enough. The token is then the one where the cumulative weight passes
the share `uniform`. As on the host, no more than 128 weights are summed in float32, and their sums in float64.
"""

import torch
import triton
import triton.language as tl

_CHUNK = 128
CHUNK = tl.constexpr(_CHUNK)
BITS = tl.constexpr(30)
"""Bits of a weight that are not always 0: the largest weight is 1."""
_WIDTH = 2048
"""Weights of a row that a program reads at once. Up to CHUNK times as many are summed in float32."""
_FILTER_WARPS = 16


@triton.jit
def _weigh(logits, peaks, sharpness, weights, vocab_size, stride, width, WIDTH: tl.constexpr):
    """Write the weights of a part of a row, 0 past the end of the vocabulary."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    content = tl.load(logits + row * stride + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = (content - tl.load(peaks + row).to(tl.float32)) * tl.load(sharpness + row)
    tl.store(weights + row * width + columns, tl.exp(scaled), mask=columns < width)


@triton.jit
def _masses(weights, width, tried, WIDTH: tl.constexpr, COUNTED: tl.constexpr):
    """Return for each of four thresholds, in bits, the sum of the weights that are at least as large, or their
    number."""
    sums = tl.zeros([4, WIDTH], tl.float32)
    for start in range(0, width, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        content = tl.load(weights + columns, mask=columns < width, other=0.0)[None, :]
        kept = content.to(tl.int32, bitcast=True) >= tried[:, None]
        sums += tl.where(kept, 1.0 if COUNTED else content, 0.0)
    return tl.sum(sums.to(tl.float64), 1)


@triton.jit
def _threshold(weights, width, least, enough, WIDTH: tl.constexpr, COUNTED: tl.constexpr):
    """Return the bits of the largest threshold that keeps `enough`, or `least` if it is larger."""
    found = least * 0
    for index in range(BITS // 2):
        tried = found | (tl.arange(0, 4) << (BITS - 2 - 2 * index))
        masses = _masses(weights, width, tl.maximum(tried, least), WIDTH, COUNTED)
        # The larger a threshold, the less it keeps.
        found = tl.max(tl.where(masses >= enough, tried, found), 0)
    return tl.maximum(found, least)


@triton.jit
def _filter(weights, top_k, top_p, min_p, thresholds, vocab_size, width, WIDTH: tl.constexpr):
    """Write the least weight that a row keeps."""
    row = tl.program_id(0).to(tl.int64)
    weights += row * width
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    least = (row * 0 + 1).to(tl.int32)
    if count < vocab_size:
        least = _threshold(weights, width, least, count.to(tl.float64), WIDTH, True)
    if share < 1:
        total = tl.max(_masses(weights, width, tl.zeros([4], tl.int32) + least, WIDTH, False), 0)
        least = _threshold(weights, width, least, share * total, WIDTH, False)
    kept = tl.maximum(least.to(tl.float32, bitcast=True), tl.load(min_p + row).to(tl.float32))
    tl.store(thresholds + row, kept)


@triton.jit
def _sum_chunks(weights, thresholds, sums, num_chunks, width, WIDTH: tl.constexpr):
    """Write the sums of some chunks of what a row keeps."""
    NUM: tl.constexpr = WIDTH // CHUNK
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    content = tl.load(weights + row * width + columns, mask=columns < width, other=0.0)
    kept = tl.where(content >= tl.load(thresholds + row), content, 0.0)
    chunks = part * NUM + tl.arange(0, NUM)
    tl.store(sums + row * num_chunks + chunks, tl.sum(tl.reshape(kept, [NUM, CHUNK]), 1), mask=chunks < num_chunks)


@triton.jit
def _find_above(cumulative, total, target):
    """Return the first place where the cumulative sum is above the target, and the sum before it. Rounding may lift a
    target to the total or above it; then it is the last place with a weight."""
    below_total = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    is_before = cumulative <= tl.minimum(target, below_total)
    return tl.sum(is_before.to(tl.int32), 0), tl.max(tl.where(is_before, cumulative, 0.0), 0)


@triton.jit
def _invert(
    weights, thresholds, sums, uniform, tokens, vocab_size, num_chunks, width, CHUNKS_WIDTH: tl.constexpr
):  # fmt: skip
    """Write the token where a row's cumulative weight passes the share `uniform` of it."""
    row, chunks, columns = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS_WIDTH), tl.arange(0, CHUNK)
    content = tl.load(sums + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    cumulative = tl.cumsum(content.to(tl.float64), 0)
    total = tl.max(cumulative, 0)
    target = tl.load(uniform + row) * total
    chunk, before = _find_above(cumulative, total, target)
    chunk = tl.minimum(chunk, num_chunks - 1)
    content = tl.load(weights + row * width + chunk * CHUNK + columns)
    kept = tl.where(content >= tl.load(thresholds + row), content, 0.0)
    cumulative = tl.cumsum(kept.to(tl.float64), 0)
    place, _ = _find_above(cumulative, tl.max(cumulative, 0), target - before)
    # A row without a finite largest logit has no meaningful token, but one that exists.
    tl.store(tokens + row, tl.minimum(chunk * CHUNK + place, vocab_size - 1).to(tl.int64))


def draw(
    logits: torch.Tensor,
    sharpness: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw token ids [n] int64 from logits [n, vocab_size]. Of the others, all [n], `sharpness` is 1 / temperature in
    float32; top_k is integers, the vocabulary's size or more where it is off; top_p, min_p, and `uniform` in [0, 1),
    the random numbers, are float64."""
    num_rows, vocab_size = logits.shape
    sharpness, top_k, top_p, min_p, uniform = (
        each.contiguous() for each in (sharpness, top_k, top_p, min_p, uniform)
    )  # fmt: skip
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    width = num_chunks * _CHUNK
    weights, sums = (logits.new_empty(num_rows, size, dtype=torch.float32) for size in (width, num_chunks))
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    parts = num_rows, triton.cdiv(width, _WIDTH)
    _weigh[parts](
        logits, logits.amax(1), sharpness, weights, vocab_size, logits.stride(0), width, _WIDTH, enable_fp_fusion=True
    )
    _filter[(num_rows,)](
        weights, top_k, top_p, min_p, thresholds, vocab_size, width, _WIDTH, num_warps=_FILTER_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    _sum_chunks[parts](weights, thresholds, sums, num_chunks, width, _WIDTH, enable_fp_fusion=True)
    _invert[(num_rows,)](
        weights, thresholds, sums, uniform, tokens, vocab_size, num_chunks, width, triton.next_power_of_2(num_chunks),
        enable_fp_fusion=True,
    )  # fmt: skip
    return tokens
