"""The largest logits of each row without sorting the row.

The vocabulary is cut into chunks, and the chunks with the largest maxima are looked through: whatever is larger than
the largest maximum that was left out is among them. A chunk is every n-th token, so that the maxima of all chunks
come of long vector operations.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.softmax import Rows, row_blocks

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
