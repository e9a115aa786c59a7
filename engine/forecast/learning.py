"""How long a step takes, learned from those that ran."""

import numpy as np
from numpy.typing import NDArray

STEP_MEMORY = 1.0 - 1.0 / 512
"""Weight of a step after one more: the last thousand steps or so count."""
MIN_SPREAD = 4.0
"""Variance in tokens below which steps are too alike to tell what a token costs."""


class StepTime:
    """Seconds of a step as a + b * tokens: a regression that forgets.

    b is 0 as long as all steps were alike, and a is never below 0.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._weight = 0.0
        self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, num_tokens: float, num_seqs: int, seconds: float) -> None:
        """One more step. Running means and moments (West 1979), which do not cancel as plain sums would."""
        self.num_observed += 1
        self._weight = self._weight * STEP_MEMORY + 1.0
        rate = 1.0 / self._weight
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += rate * off_tokens
        self._seconds += rate * off_seconds
        self._variance = (1.0 - rate) * (self._variance + rate * off_tokens * off_tokens)
        self._covariance = (1.0 - rate) * (self._covariance + rate * off_tokens * off_seconds)

    def seconds(self, num_tokens: float, num_seqs: float) -> float:
        """Of a step with so many tokens; 0 before any was observed."""
        slope = max(self._covariance / (self._variance + MIN_SPREAD), 0.0)
        if slope * self._tokens > self._seconds:  # as if nothing but tokens took time
            return self._seconds * num_tokens / self._tokens
        return self._seconds + slope * (num_tokens - self._tokens)


Floats = NDArray[np.float64]

NUM_BINS = 16
ENDING_MEMORY = 1.0 - 1.0 / 256
"""Weight of an ending after one more: the last few hundred endings count."""
QUANTILES = (np.arange(8) + 0.5) / 8
"""At which points of what it may yet use a running sequence is thought to end: an eighth of it at each."""


class Usage:
    """Shares of `max_tokens` that were used, as a histogram, and how much lengths of outputs differ. Both forget."""

    def __init__(self) -> None:
        self._edges = np.append(np.linspace(0.0, 1.0, NUM_BINS + 1), 1.0)  # the last bin is 1 itself
        self._weights = np.zeros(NUM_BINS + 1)
        self._weights[-1] = 1.0  # until told otherwise, all is used
        self.mean = 1.0
        self._length = self._square = 0.0

    def observe(self, max_tokens: int, num_output: int) -> None:
        """A sequence ended."""
        share = min(num_output / max_tokens, 1.0)
        self._weights *= ENDING_MEMORY
        self._weights[int(share * NUM_BINS)] += 1.0
        rate = 1.0 / float(self._weights.sum())
        self.mean += rate * (share - self.mean)
        rate = rate if self._length else 1.0
        self._length += rate * (num_output - self._length)
        self._square += rate * (num_output * num_output - self._square)

    @property
    def variation(self) -> float:
        """Squared coefficient of variation of the outputs' lengths: 0 where all are as long, about 1 where they end
        at random."""
        if not self._length:
            return 0.0
        return max(self._square / (self._length * self._length) - 1.0, 0.0)

    def share_at(self, quantile: float) -> float:
        """The share of `max_tokens` that is not exceeded in so many of all cases."""
        return float(np.interp(quantile, self._reached(), self._edges))

    def _reached(self) -> Floats:
        """[edges]: in which share of the cases no more than that is used."""
        reached: Floats = np.concatenate(([0.0], np.cumsum(self._weights / self._weights.sum())))
        return reached

    def left(self, num_output: Floats, max_tokens: Floats) -> Floats:
        """[num_seqs, quantiles]: tokens left to each sequence at each of QUANTILES, given those it has."""
        done = num_output / max_tokens
        reached = self._reached()
        past = np.interp(done, self._edges, reached)
        levels = past[:, None] + QUANTILES * (1.0 - past[:, None])
        ends: Floats = np.interp(levels, reached, self._edges)
        left: Floats = (ends - done[:, None]) * max_tokens[:, None]
        return np.maximum(left, 1.0)
