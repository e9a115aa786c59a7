"""What the rows that draw at random want, as arrays, so that rows with different parameters are worked on at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.softmax import Rows
from engine.sampling.state import SamplingState
from engine.sampling.uniform import uniform

Mask = NDArray[np.bool_]
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry a row that draws; all arrays are [n]."""

    rows: Rows
    """Rows of the logits."""
    peaks: FloatArray
    """Their largest logits."""
    sharpness: FloatArray
    """1 / temperature"""
    top_k: NDArray[np.intp]
    """At least the size of the vocabulary where it is off."""
    top_p: _Numbers
    min_p: _Numbers
    typical_p: _Numbers
    uniform: _Numbers
    """The random number of the token to draw, in [0, 1)."""

    def those(self, which: Rows | Mask | slice) -> "Draws":
        """The entries `which`."""
        return Draws(*(getattr(self, field.name)[which] for field in fields(self)))

    def is_filtered(self, vocab_size: int) -> Mask:
        """Whether any filter is on."""
        mask: Mask = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0) | (self.typical_p < 1)
        return mask

    def needs_mean(self, vocab_size: int) -> Mask:
        """Whether typical_p is the only filter, so that its entropy is that of all tokens."""
        mask: Mask = (self.typical_p < 1) & ~((self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0))
        return mask

    def needs_total(self, vocab_size: int) -> Mask:
        """Whether the first filter keeps a share of all tokens' weight."""
        mask: Mask = (self.top_k >= vocab_size) & (self.top_p < 1)
        return mask


def draws_of(states: Sequence[SamplingState], rows: Rows, peaks: FloatArray) -> Draws:
    """What `states`, of which none is greedy, want of their `rows` of the logits."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    return Draws(rows, peaks, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers)
