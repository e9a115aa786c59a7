"""One token for each sequence of a step."""

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.filters import filter_weights
from engine.sampling.penalties import edit_logits
from engine.sampling.state import SamplingState

_CHUNK = 128
"""Tokens summed up together when a number is looked up in the cumulative sum."""


def sample(logits: FloatArray, states: list[SamplingState]) -> NDArray[np.intp]:
    """Choose token ids [num_rows] from `logits` [num_rows, vocab_size], which may be overwritten."""
    for row, state in enumerate(states):
        if state.edits_logits:
            edit_logits(logits[row], state)
    token_ids: NDArray[np.intp] = logits.argmax(axis=1)
    drawn = [row for row, state in enumerate(states) if state.generator is not None]
    if drawn:
        token_ids[drawn] = _draw(logits[drawn], [states[row] for row in drawn])
    return token_ids


def _draw(logits: FloatArray, states: list[SamplingState]) -> NDArray[np.intp]:
    """Draw from the softmax at each row's temperature, after the filters."""
    vocab_size = logits.shape[1]
    weights = np.zeros((len(states), -(-vocab_size // _CHUNK) * _CHUNK), np.float32)
    scaled = weights[:, :vocab_size]
    temperatures = np.array([state.params.temperature for state in states], np.float32)
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=scaled)
    np.divide(scaled, temperatures[:, None], out=scaled)
    np.exp(scaled, out=scaled)
    filter_weights(scaled, [state.params for state in states])
    uniform = np.array([state.generator.random() for state in states if state.generator is not None])
    return _invert(weights, uniform)


def _invert(weights: FloatArray, uniform: NDArray[np.float64]) -> NDArray[np.intp]:
    """For each row the index where the cumulative sum of `weights` passes the share `uniform` (in [0, 1)) of it.

    First the chunk is found, then the place in it, so that the whole row is only summed, not accumulated.
    """
    rows = np.arange(len(weights))
    chunks = weights.reshape(len(weights), -1, _CHUNK)
    chunk_ends = np.cumsum(chunks.sum(axis=2), axis=1, dtype=np.float64)
    targets = uniform * chunk_ends[:, -1]
    # A strict comparison never ends on a weight of 0: there the sum is what it was before.
    chunk = (chunk_ends > targets[:, None]).argmax(axis=1)
    before = np.where(chunk > 0, chunk_ends[rows, chunk - 1], 0.0)
    ends = np.cumsum(chunks[rows, chunk], axis=1, dtype=np.float64)
    # The two sums of a chunk may differ in the last bit; the last place that still adds something ends it.
    targets = np.minimum(targets - before, np.nextafter(ends[:, -1], 0.0))
    found: NDArray[np.intp] = chunk * _CHUNK + (ends > targets[:, None]).argmax(axis=1)
    return found
