"""The parameters of rows that draw at random, from the states of their sequences."""

from collections.abc import Sequence

import numpy as np

from sluice.engine.arrays import Rows
from sluice.engine.runners.base import Draws
from sluice.engine.sampling.random_numbers import uniform
from sluice.engine.sampling.state import SamplingState


def collect_draws(states: Sequence[SamplingState], rows: Rows, num_ahead: Sequence[int] | int = 0) -> Draws:
    """Collect the parameters of `states`, none of which is greedy, for their `rows` of the logits. The states have not
    observed their last `num_ahead` tokens yet."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64) + np.array(num_ahead, np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    wanted = np.array([state.wanted for state in states], np.intp)
    return Draws(rows, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers, wanted)
