"""Reads rows of logits once, on all cores: all that is needed of a row is computed while it is in a core's cache."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import Doubles, FloatArray, Ids, Rows
from sluice.engine.runners.base import Statistic
from sluice.engine.sampling.cores import Cores, Work, block_size, row_blocks, row_picker
from sluice.engine.sampling.softmax import CHUNK, scale, sum_chunks, sum_rows, weigh
from sluice.engine.sampling.top_tokens import STRIPE, stripe_maxima

_LEAST_SCALED = np.float32(-1e4)
"""The weight of so low a scaled logit is 0, and their product is 0 too (0 times -inf would not be a number)."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of a scan of logits, one entry per row."""

    peaks: FloatArray
    """The largest logit [n]; not finite if the row has no finite one, or something that is no number."""
    maxima: FloatArray
    """The largest logit of each stripe, [n, num_stripes]."""
    coarse: FloatArray
    """`stripe_maxima` of these."""
    totals: Doubles
    """The sum of the weights [n], NaN unless it is wanted."""
    means: Doubles
    """The mean of their logarithm [n], NaN unless it is wanted."""

    def select(self, which: Ids | NDArray[np.bool_] | slice) -> "Scan":
        """Return the entries `which`."""
        return Scan(*(getattr(self, name)[which] for name in _FIELDS))


_FIELDS = tuple(field.name for field in fields(Scan))


def scan(logits: FloatArray, rows: Rows, sharpness: FloatArray, wanted: Statistic, cores: Cores) -> Scan:
    """Scan `rows` [n] of `logits`. `sharpness` [n] is 1 / temperature, for the weights."""
    num_rows, vocab_size = len(rows), logits.shape[1]
    maxima = np.empty((num_rows, vocab_size // STRIPE), np.float32)
    coarse = np.empty((num_rows, maxima.shape[1] // STRIPE), np.float32)
    found = Scan(np.empty(num_rows, np.float32), maxima, coarse, *np.full((2, num_rows), np.nan))
    blocks, pick = row_blocks(num_rows, vocab_size), row_picker(logits, rows)

    def begin() -> Work:
        room = (0, 0) if wanted is Statistic.NOTHING else (block_size(num_rows, vocab_size), vocab_size)
        scaled_buffer = np.empty(room, np.float32)
        weights_buffer = np.empty(room, np.float32) if wanted is Statistic.MEAN else scaled_buffer

        def work(which: slice) -> None:
            block = pick(which)
            stripe_maxima(stripe_maxima(block, out=maxima[which]), out=coarse[which])
            found.peaks[which] = _row_maxima(maxima[which])
            if vocab_size % STRIPE:
                rest = _row_maxima(block[:, maxima.shape[1] * STRIPE :])
                found.peaks[which] = np.maximum(found.peaks[which], rest)
            if wanted is Statistic.NOTHING:
                return
            scaled = scale(block, found.peaks[which], sharpness[which], out=scaled_buffer[: len(block)])
            weights = weights_buffer[: len(block)]
            if wanted is Statistic.MEAN:
                np.maximum(scaled, _LEAST_SCALED, out=scaled)
            found.totals[which] = sum_rows(np.exp(scaled, out=weights))
            if wanted is Statistic.MEAN:
                found.means[which] = sum_rows(np.multiply(scaled, weights, out=scaled)) / found.totals[which]

        return work

    cores.share(blocks, num_rows * vocab_size, begin)
    return found


def _row_maxima(values: FloatArray) -> FloatArray:
    maxima: FloatArray = values.max(axis=1, initial=-np.inf)
    return maxima


def scan_chunks(logits: FloatArray, rows: Rows, sharpness: FloatArray, cores: Cores) -> tuple[FloatArray, FloatArray]:
    """Return the largest logit [n] of each of `rows` [n], as in `Scan`, and the sums of the weights of each CHUNK of
    consecutive tokens, [n, ceil(vocab_size / CHUNK)]."""
    num_rows, vocab_size = len(rows), logits.shape[1]
    num_chunks = -(-vocab_size // CHUNK)
    peaks, sums = np.empty(num_rows, np.float32), np.empty((num_rows, num_chunks), np.float32)
    blocks, pick = row_blocks(num_rows, vocab_size), row_picker(logits, rows)

    def begin() -> Work:
        buffer = np.zeros((block_size(num_rows, vocab_size), num_chunks * CHUNK), np.float32)

        def work(which: slice) -> None:
            block = pick(which)
            peaks[which] = _row_maxima(block)
            padded = buffer[: len(block)]
            weigh(block, peaks[which], sharpness[which], out=padded[:, :vocab_size])
            sum_chunks(padded, out=sums[which])

        return work

    cores.share(blocks, num_rows * vocab_size, begin)
    return peaks, sums
