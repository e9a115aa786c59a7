"""Changes to one row of logits before a token is chosen."""

import numpy as np

from engine.runners.base import FloatArray
from engine.sampling.state import SamplingState


def edit_logits(row: FloatArray, state: SamplingState) -> None:
    """Apply the penalties and the ban on early stops to `row` [vocab_size], in place."""
    if state.seen is not None:
        _repetition(row, state.seen.ids, state.params.repetition_penalty)
    if state.output is not None:
        counts = state.output.counts
        row[state.output.ids] -= state.params.frequency_penalty * counts + state.params.presence_penalty
    if state.is_held_open:
        row[state.banned] = -np.inf


def _repetition(row: FloatArray, ids: np.ndarray[tuple[int], np.dtype[np.int32]], penalty: float) -> None:
    """Divide positive and multiply negative logits of tokens seen (CTRL, arXiv 1909.05858; as transformers does)."""
    scores = row[ids]
    row[ids] = np.where(scores > 0, scores / penalty, scores * penalty)
