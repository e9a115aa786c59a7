"""Softmax over a large vocabulary: rows are taken in blocks that stay in a core's cache.

A weight is a token's probability over that of the likeliest one.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.inversion import CHUNK, Numbers, sum_chunks

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
