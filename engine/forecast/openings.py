"""When capacity comes free as the sequences that run end, and those that take their places end in turn."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Openings:
    """So much of one kind of capacity (places, blocks) is free now, and more comes free at `ends`, in steps from now.

    What has come free is taken by others, who give it back after a life. Either all lives are alike: then what came
    free by t comes free again at t + life. Or they end at random: then each has the chance 1 / life in each step. With
    D(t) free by t, the capacity that was to be had by t is D(t) + D(t - life) + ... in the first case and
    D(t) + integral of D / life in the second; real crowds are taken to be between the two.
    """

    def __init__(self, free: float, ends: Floats, amounts: Floats) -> None:
        """`ends` ascending, and what comes free at each."""
        self._ends = np.append(0.0, ends)
        self._freed = free + np.append(0.0, np.cumsum(amounts))
        self._area = np.append(0.0, np.cumsum(self._freed[:-1] * np.diff(self._ends)))

    def steps_to(self, amount: float, life: float, variation: float) -> float:
        """Until so much was to be had. `variation`: 0 for lives that are alike to 1 for lives that end at random."""
        randomness = min(variation, 1.0)
        alike = self._steps_if_alike(amount, life)
        return alike + randomness * (self._steps_if_random(amount, life) - alike)

    def end_at(self, quantile: float) -> float:
        """When that part of those who run has ended."""
        return float(self._ends[round(quantile * (len(self._ends) - 1))])

    def _steps_if_alike(self, amount: float, life: float) -> float:
        # What is asked of the last round is more than nothing, so that a multiple of all is no round too many.
        rounds = max(-(-amount // self._freed[-1]) - 1.0, 0.0)
        index = int(self._freed.searchsorted(amount - rounds * self._freed[-1]))
        # Where some go on for longer than a life, what others took has been given back by then.
        return float(min(self._ends[min(index, len(self._ends) - 1)], life) + rounds * life)

    def _steps_if_random(self, amount: float, life: float) -> float:
        had = self._freed + self._area / life
        index = int(had.searchsorted(amount))
        if index == 0:
            return 0.0
        before = index - 1  # between two ends it grows by what is free, a life at a time
        steps = float(self._ends[before] + (amount - had[before]) * life / max(self._freed[before], 1e-9))
        return steps if index == len(had) else min(steps, float(self._ends[index]))
