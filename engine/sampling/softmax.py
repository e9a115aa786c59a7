"""Arithmetic on rows of logits over a large vocabulary: softmax weights and sums, inversion, top tokens. Blocks of rows
stay in a core's cache. A weight is a token's probability divided by that of the most likely one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray

Rows = NDArray[np.intp]
Ids = NDArray[np.intp]
Doubles = NDArray[np.float64]

CHUNK = 128
"""Number of consecutive tokens that are summed in float32; the sums of chunks are added in float64."""

_BLOCK = 2**17
"""Logits processed at a time: half a megabyte, and as much for their weights. Four times as many take twice as long."""

_LEAST_SCALED = np.float32(-1e4)
"""The weight of so low a scaled logit is 0, and their product is 0 too (0 times -inf would not be a number)."""

_STRIPE = 8
"""Tokens in a stripe, in the search for top tokens."""
_NUM_STRIPES = 128
"""Number of stripes searched. At least as many tokens are certain to be the largest, ties at the bound aside."""


# -- rows


def row_blocks(logits: FloatArray, rows: Rows, width: int | None = None) -> Iterator[tuple[slice, FloatArray]]:
    """Yield `logits[rows]` in blocks: (slice of `rows`, their logits). Consecutive rows are not copied. `width` is how
    many numbers are computed for each row, if that is not its own length."""
    size = max(1, _BLOCK // (width or logits.shape[1]))
    for begin in range(0, len(rows), size):
        block_rows = rows[begin : begin + size].tolist()
        run = range(block_rows[0], block_rows[0] + len(block_rows))
        which = slice(begin, begin + len(block_rows))
        yield which, logits[run.start : run.stop] if block_rows == [*run] else logits[rows[which]]


def argmax_tokens(logits: FloatArray, rows: Rows) -> Ids:
    """Return the id [n] of each row's largest logit: the smallest id among equal ones, or that of a NaN."""
    token_ids = np.empty(len(rows), np.intp)
    for which, block in row_blocks(logits, rows):
        block.argmax(axis=1, out=token_ids[which])
    return token_ids


# -- weights


def weigh(values: FloatArray, peaks: FloatArray, sharpness: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return the weights of `values` [n, any]: exp((value - peak) * sharpness). `sharpness` [n] is 1 / temperature."""
    weights = scale(values, peaks, sharpness, out)
    return np.exp(weights, out=weights)


def scale(values: FloatArray, peaks: FloatArray, sharpness: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return (value - peak) * sharpness."""
    # A logit near float32's lowest may overflow here; its weight is then 0, which is right.
    with np.errstate(over="ignore"):
        scaled: FloatArray = np.subtract(values, peaks[:, None], out=out)
        return np.multiply(scaled, sharpness[:, None], out=scaled)


def sum_chunks(weights: FloatArray, out: FloatArray) -> None:
    """Sum each CHUNK of `weights` [n, num_chunks * CHUNK] into `out` [n, num_chunks]."""
    weights.reshape(len(weights), -1, CHUNK).sum(axis=2, out=out)


def chunk_sums(logits: FloatArray, rows: Rows, peaks: FloatArray, sharpness: FloatArray) -> FloatArray:
    """Return sums of weights [n, ceil(vocab_size / CHUNK)]; chunk c covers the tokens from `c * CHUNK` on."""
    sums = np.empty((len(rows), -(-logits.shape[1] // CHUNK)), np.float32)
    buffer = _buffer(logits, rows)
    for which, block in row_blocks(logits, rows):
        padded = buffer[: len(block)]
        weigh(block, peaks[which], sharpness[which], out=padded[:, : logits.shape[1]])
        sum_chunks(padded, sums[which])
    return sums


def sum_weights(logits: FloatArray, rows: Rows, peaks: FloatArray, sharpness: FloatArray) -> Doubles:
    """Return the sum of all weights of each row [n]."""
    total: Doubles = chunk_sums(logits, rows, peaks, sharpness).sum(axis=1, dtype=np.float64)
    return total


def sum_weights_and_means(
    logits: FloatArray, rows: Rows, peaks: FloatArray, sharpness: FloatArray
) -> tuple[Doubles, Doubles]:
    """Return the sum of all weights [n], and the expectation of their logarithm [n] under the softmax."""
    sums = np.empty((2, len(rows), -(-logits.shape[1] // CHUNK)), np.float32)
    scaled_buffer, weights_buffer = _buffer(logits, rows), _buffer(logits, rows)
    for which, block in row_blocks(logits, rows):
        scaled, weights = scaled_buffer[: len(block)], weights_buffer[: len(block)]
        tokens = slice(logits.shape[1])
        scale(block, peaks[which], sharpness[which], out=scaled[:, tokens])
        np.maximum(scaled, _LEAST_SCALED, out=scaled)
        np.exp(scaled[:, tokens], out=weights[:, tokens])
        sum_chunks(weights, sums[0, which])
        np.multiply(scaled, weights, out=scaled)
        sum_chunks(scaled, sums[1, which])
    total, scaled_total = sums.sum(axis=2, dtype=np.float64)
    return total, scaled_total / total


def _buffer(logits: FloatArray, rows: Rows) -> FloatArray:
    """Allocate room for a block, each row padded with zeros to whole chunks. Once a call, as fresh memory is slow."""
    vocab_size = logits.shape[1]
    num_rows = min(max(1, _BLOCK // vocab_size), len(rows))
    return np.zeros((num_rows, -(-vocab_size // CHUNK) * CHUNK), np.float32)


# -- inversion: from a random number to the place where cumulative weights pass that share of their sum


def invert(cumulative: Doubles, uniform: Doubles) -> Ids:
    """Return the place [n] where `cumulative` [n, width] first exceeds the share `uniform` (in [0, 1)) of its last.
    That place has a weight above 0, because at a weight of 0 the sum does not change."""
    return _first_above(cumulative, uniform * cumulative[:, -1])


def invert_chunks(sums: FloatArray, uniform: Doubles, chunk_weights: Callable[[Ids], FloatArray]) -> Ids:
    """Invert rows of which only the `sums` [n, num_chunks] of chunks are known. `chunk_weights(chunks)` returns the
    weights [n, CHUNK] of one chunk [n] of each row."""
    cumulative = np.cumsum(sums, axis=1, dtype=np.float64)
    chunk = invert(cumulative, uniform)
    before = np.where(chunk > 0, cumulative[np.arange(len(cumulative)), chunk - 1], 0.0)
    within = np.cumsum(chunk_weights(chunk), axis=1, dtype=np.float64)
    return chunk * CHUNK + _first_above(within, uniform * cumulative[:, -1] - before)


def _first_above(cumulative: Doubles, targets: Doubles) -> Ids:
    # Rounding may lift a target to the sum or above it; then it is the last place with a weight.
    limits = np.minimum(targets, np.nextafter(cumulative[:, -1], -np.inf))
    return np.asarray(np.count_nonzero(cumulative <= limits[:, None], axis=1))


# -- top tokens
#
# The vocabulary is divided into stripes, and those with the largest maxima are searched: a token that is larger than
# the largest maximum of the other stripes is in one of them. A stripe is every n-th token, so that the maxima of all
# stripes are computed by long vector operations.


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Some tokens of each row, including all above its `bound`, in order of their ids."""

    values: FloatArray
    """Logits, [n, num_tokens]."""
    token_ids: Ids
    """[n, num_tokens]"""
    bound: FloatArray
    """[n]; -inf if all tokens of the row are included."""


def top_tokens(logits: FloatArray, rows: Rows) -> TopTokens:
    """Return about a thousand tokens of each of `rows` [n], or all of them if there are not many more."""
    stride = logits.shape[1] // _STRIPE
    if stride <= _NUM_STRIPES:
        return all_tokens(logits, rows)
    return _gather_stripes(logits, rows, _stripe_maxima(logits, rows, stride))


def all_tokens(logits: FloatArray, rows: Rows) -> TopTokens:
    """Return all tokens of `rows` [n]."""
    shape = (len(rows), logits.shape[1])
    token_ids = np.broadcast_to(np.arange(logits.shape[1]), shape)
    return TopTokens(logits[rows], token_ids, np.full(len(rows), -np.inf, np.float32))


def _stripe_maxima(logits: FloatArray, rows: Rows, stride: int) -> FloatArray:
    """Return the largest logit of each stripe [n, stride]. Stripe c has the tokens c, c + stride, c + 2 * stride..."""
    maxima = np.empty((len(rows), stride), np.float32)
    for which, block in row_blocks(logits, rows):
        block[:, : stride * _STRIPE].reshape(len(block), _STRIPE, stride).max(axis=1, out=maxima[which])
    return maxima


def _gather_stripes(logits: FloatArray, rows: Rows, maxima: FloatArray) -> TopTokens:
    """Return the tokens of the stripes with the largest maxima, and the few tokens that are in no stripe."""
    stride, vocab_size = maxima.shape[1], logits.shape[1]
    # The chosen stripes come after place `pivot`, the others before it, and the largest of those at it.
    pivot = stride - _NUM_STRIPES - 1
    order = np.argpartition(maxima, pivot, axis=1)
    bound = maxima[np.arange(len(rows)), order[:, pivot]]
    stripes = np.sort(order[:, pivot + 1 :], axis=1)
    in_stripes = (np.arange(_STRIPE)[:, None] * stride + stripes[:, None, :]).reshape(len(rows), -1)
    rest = np.broadcast_to(np.arange(stride * _STRIPE, vocab_size), (len(rows), vocab_size % _STRIPE))
    token_ids = np.concatenate([in_stripes, rest], axis=1)
    return TopTokens(logits[rows[:, None], token_ids], token_ids, bound)
