"""Softmax over a large vocabulary: rows are taken in blocks that stay in a core's cache.

A weight is a token's probability over that of the likeliest one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray

CHUNK = 128
"""Tokens that are summed up in float32; sums of chunks are added in float64."""

Counts = NDArray[np.intp]
Numbers = NDArray[np.float64]


def sum_chunks(weights: FloatArray, out: FloatArray) -> None:
    """Sum each CHUNK of `weights` [n, num_chunks * CHUNK] into `out` [n, num_chunks]."""
    weights.reshape(len(weights), -1, CHUNK).sum(axis=2, out=out)


def invert(held: Numbers, uniform: Numbers) -> Counts:
    """The place [n] where cumulative `held` [n, width] first exceeds the share `uniform` (in [0, 1)) of its last.

    What stands there weighs something: at a weight of 0 the sum is what it was before.
    """
    return _first_above(held, uniform * held[:, -1])


def invert_chunks(sums: FloatArray, uniform: Numbers, weights_of: Callable[[Counts], FloatArray]) -> Counts:
    """The same for rows of which only the `sums` [n, num_chunks] of chunks are at hand.

    `weights_of(chunks)` are the weights [n, CHUNK] of one chunk [n] of each row.
    """
    held = np.cumsum(sums, axis=1, dtype=np.float64)
    chunk = invert(held, uniform)
    before = np.where(chunk > 0, held[np.arange(len(held)), chunk - 1], 0.0)
    within = np.cumsum(weights_of(chunk), axis=1, dtype=np.float64)
    return chunk * CHUNK + _first_above(within, uniform * held[:, -1] - before)


def _first_above(held: Numbers, targets: Numbers) -> Counts:
    # Rounding may lift a target to the sum or above it; then it is the last place that still adds something.
    limits = np.minimum(targets, np.nextafter(held[:, -1], -np.inf))
    return np.asarray(np.count_nonzero(held <= limits[:, None], axis=1))


Rows = NDArray[np.intp]

_BLOCK = 2**17
"""Logits worked on at a time: half a megabyte, and as much for their weights. Four times as many take twice as long."""

_LEAST_SCALED = np.float32(-1e4)
"""A logit so far below the largest weighs 0, and 0 times it is 0 (0 times -inf is not a number)."""


def row_blocks(logits: FloatArray, rows: Rows, width: int | None = None) -> Iterator[tuple[slice, FloatArray]]:
    """`logits[rows]` piece by piece: (which of `rows`, their logits). Rows that follow each other are not copied.

    `width` is how many numbers will be made of each row, where that is not its own length.
    """
    size = max(1, _BLOCK // (width or logits.shape[1]))
    for begin in range(0, len(rows), size):
        wanted = rows[begin : begin + size].tolist()
        run = range(wanted[0], wanted[0] + len(wanted))
        which = slice(begin, begin + len(wanted))
        yield which, logits[run.start : run.stop] if wanted == [*run] else logits[rows[which]]


def likeliest(logits: FloatArray, rows: Rows) -> Rows:
    """The id [n] of each row's largest logit, the smallest id among equal ones; that of a NaN where there is one."""
    token_ids = np.empty(len(rows), np.intp)
    for which, block in row_blocks(logits, rows):
        block.argmax(axis=1, out=token_ids[which])
    return token_ids


def weigh(values: FloatArray, peaks: FloatArray, sharpness: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Weights of `values` [n, any]: exp((value - peak) * sharpness). `sharpness` [n] is 1 / temperature."""
    weights = scale(values, peaks, sharpness, out)
    return np.exp(weights, out=weights)


def scale(values: FloatArray, peaks: FloatArray, sharpness: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """(value - peak) * sharpness."""
    # A logit near float32's least may leave its range here; its weight is 0 as it should be.
    with np.errstate(over="ignore"):
        scaled: FloatArray = np.subtract(values, peaks[:, None], out=out)
        return np.multiply(scaled, sharpness[:, None], out=scaled)


def chunk_sums(logits: FloatArray, rows: Rows, peaks: FloatArray, sharpness: FloatArray) -> FloatArray:
    """Sums of weights [n, ceil(vocab_size / CHUNK)]; chunk c covers the tokens from `c * CHUNK` on."""
    sums = np.empty((len(rows), -(-logits.shape[1] // CHUNK)), np.float32)
    buffer = _buffer(logits, rows)
    for which, block in row_blocks(logits, rows):
        padded = buffer[: len(block)]
        weigh(block, peaks[which], sharpness[which], out=padded[:, : logits.shape[1]])
        sum_chunks(padded, sums[which])
    return sums


def totals(logits: FloatArray, rows: Rows, peaks: FloatArray, sharpness: FloatArray) -> Numbers:
    """Sum of all weights [n]."""
    total: Numbers = chunk_sums(logits, rows, peaks, sharpness).sum(axis=1, dtype=np.float64)
    return total


def totals_and_means(
    logits: FloatArray, rows: Rows, peaks: FloatArray, sharpness: FloatArray
) -> tuple[Numbers, Numbers]:
    """Sum of all weights [n], and the expectation [n] of their logarithm under the softmax."""
    sums = np.empty((2, len(rows), -(-logits.shape[1] // CHUNK)), np.float32)
    scaled_buffer, weights_buffer = _buffer(logits, rows), _buffer(logits, rows)
    for which, block in row_blocks(logits, rows):
        scaled, weights = scaled_buffer[: len(block)], weights_buffer[: len(block)]
        of_tokens = slice(logits.shape[1])
        scale(block, peaks[which], sharpness[which], out=scaled[:, of_tokens])
        np.maximum(scaled, _LEAST_SCALED, out=scaled)
        np.exp(scaled[:, of_tokens], out=weights[:, of_tokens])
        sum_chunks(weights, sums[0, which])
        np.multiply(scaled, weights, out=scaled)
        sum_chunks(scaled, sums[1, which])
    total, of_scaled = sums.sum(axis=2, dtype=np.float64)
    return total, of_scaled / total


def _buffer(logits: FloatArray, rows: Rows) -> FloatArray:
    """Room for a block, each row filled up with zeros to whole chunks. Made once a call: fresh memory is slow."""
    vocab_size = logits.shape[1]
    num_rows = min(max(1, _BLOCK // vocab_size), len(rows))
    return np.zeros((num_rows, -(-vocab_size // CHUNK) * CHUNK), np.float32)


_CHUNK = 8
_NUM_CHUNKS = 128
"""So many chunks are looked through: at least so many tokens are sure to be the largest, ties at the border aside."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Some tokens of each row, all that are above its `bound` among them, in order of their ids."""

    values: FloatArray
    """[n, num_candidates], logits"""
    token_ids: NDArray[np.intp]
    """[n, num_candidates]"""
    bound: FloatArray
    """[n]; -inf where all tokens are candidates"""


def shortlist(logits: FloatArray, rows: Rows) -> Candidates:
    """About a thousand tokens of each of `rows` [n], or all of them where there are not many more."""
    stride = logits.shape[1] // _CHUNK
    if stride <= _NUM_CHUNKS:
        return whole(logits, rows)
    return _gather(logits, rows, _maxima(logits, rows, stride))


def whole(logits: FloatArray, rows: Rows) -> Candidates:
    """All tokens of `rows` [n]."""
    shape = (len(rows), logits.shape[1])
    token_ids = np.broadcast_to(np.arange(logits.shape[1]), shape)
    return Candidates(logits[rows], token_ids, np.full(len(rows), -np.inf, np.float32))


def _maxima(logits: FloatArray, rows: Rows, stride: int) -> FloatArray:
    """The largest logit of each chunk [n, stride]; chunk c holds the tokens c, c + stride, c + 2 * stride, ..."""
    maxima = np.empty((len(rows), stride), np.float32)
    for which, block in row_blocks(logits, rows):
        block[:, : stride * _CHUNK].reshape(len(block), _CHUNK, stride).max(axis=1, out=maxima[which])
    return maxima


def _gather(logits: FloatArray, rows: Rows, maxima: FloatArray) -> Candidates:
    """The tokens of the chunks with the largest maxima, and the few that no chunk covers."""
    stride, vocab_size = maxima.shape[1], logits.shape[1]
    # From place `pivot` on stand the chunks wanted, before it the rest, and on it the largest of the rest.
    pivot = stride - _NUM_CHUNKS - 1
    order = np.argpartition(maxima, pivot, axis=1)
    bound = maxima[np.arange(len(rows)), order[:, pivot]]
    chunks = np.sort(order[:, pivot + 1 :], axis=1)
    covered = (np.arange(_CHUNK)[:, None] * stride + chunks[:, None, :]).reshape(len(rows), -1)
    rest = np.broadcast_to(np.arange(stride * _CHUNK, vocab_size), (len(rows), vocab_size % _CHUNK))
    token_ids = np.concatenate([covered, rest], axis=1)
    return Candidates(logits[rows[:, None], token_ids], token_ids, bound)
