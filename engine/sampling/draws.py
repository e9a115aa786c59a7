"""The parameters of rows that draw at random."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.cores import Rows
from engine.sampling.random_numbers import Doubles, uniform
from engine.sampling.state import NO_TOP_K, SamplingState

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of the rows that draw at random, one entry a row; all arrays are [n]."""

    rows: Rows
    """Rows of the logits."""
    sharpness: FloatArray
    """1 / temperature."""
    top_k: NDArray[np.intp]
    """NO_TOP_K if it is off."""
    top_p: Doubles
    min_p: Doubles
    typical_p: Doubles
    uniform: Doubles
    """The random number of the token to draw, in [0, 1)."""
    wanted: NDArray[np.intp]
    """A `Wanted` for each row."""

    def select(self, which: Rows | Mask | slice) -> "Draws":
        """Return the entries `which`."""
        return Draws(*(getattr(self, name)[which] for name in _FIELDS))

    @property
    def has_top_k(self) -> Mask:
        return self.top_k < NO_TOP_K


_FIELDS = tuple(field.name for field in fields(Draws))


def collect_draws(states: Sequence[SamplingState], rows: Rows) -> Draws:
    """Collect the parameters of `states`, none of which is greedy, for their `rows` of the logits."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    wanted = np.array([state.wanted for state in states], np.intp)
    return Draws(rows, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers, wanted)
