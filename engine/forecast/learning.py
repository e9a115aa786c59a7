"""Models that learn from what has run: how long a step takes, and how much of their limit outputs use."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP_MEMORY = 1.0 - 1.0 / 512
"""Factor by which each step reduces the weight of earlier ones: about the last thousand count."""
MIN_SPREAD = 4.0
"""Variance in tokens below which steps are too similar to tell the cost of a token."""

NUM_BINS = 16
ENDING_MEMORY = 1.0 - 1.0 / 256
"""Factor by which each ending reduces the weight of earlier ones: the last few hundred count."""
QUANTILES = (np.arange(8) + 0.5) / 8
"""Quantiles of the remaining output at which a running sequence is assumed to end, with a probability of 1/8 each."""


class StepTimeModel:
    """Models the seconds of a step as a + b * tokens, by a regression that forgets. b is 0 as long as all steps had
    similar numbers of tokens, and a is never below 0."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._weight = 0.0
        self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Learn from one step, by running means and moments (West 1979), which do not cancel as plain sums would."""
        self.num_observed += 1
        self._weight = self._weight * STEP_MEMORY + 1.0
        rate = 1.0 / self._weight
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += rate * off_tokens
        self._seconds += rate * off_seconds
        self._variance = (1.0 - rate) * (self._variance + rate * off_tokens * off_tokens)
        self._covariance = (1.0 - rate) * (self._covariance + rate * off_tokens * off_seconds)

    def seconds(self, num_tokens: float) -> float:
        """Return the expected duration of a step with `num_tokens`; 0 before any step was observed."""
        slope = max(self._covariance / (self._variance + MIN_SPREAD), 0.0)
        if slope * self._tokens > self._seconds:  # the fit has a negative a: only tokens take time
            return self._seconds * num_tokens / self._tokens
        return self._seconds + slope * (num_tokens - self._tokens)


class OutputLengths:
    """Models which fraction of `max_tokens` outputs use, as a histogram, and how much their lengths vary. It forgets.
    Until the first ending it assumes that outputs use all of `max_tokens`."""

    def __init__(self) -> None:
        self._edges = np.append(np.linspace(0.0, 1.0, NUM_BINS + 1), 1.0)  # the last bin is exactly 1
        self._weights = np.zeros(NUM_BINS + 1)
        self._weights[-1] = 1.0
        self.mean = 1.0
        """Mean used fraction."""
        self._length = self._square = 0.0

    def observe(self, max_tokens: int, num_output: int) -> None:
        """Learn from a sequence that has ended."""
        fraction = min(num_output / max_tokens, 1.0)
        self._weights *= ENDING_MEMORY
        self._weights[int(fraction * NUM_BINS)] += 1.0
        rate = 1.0 / float(self._weights.sum())
        self.mean += rate * (fraction - self.mean)
        rate = rate if self._length else 1.0
        self._length += rate * (num_output - self._length)
        self._square += rate * (num_output * num_output - self._square)

    @property
    def variation(self) -> float:
        """Squared coefficient of variation of the lengths: 0 if all are equal, about 1 if outputs end at random."""
        if not self._length:
            return 0.0
        return max(self._square / (self._length * self._length) - 1.0, 0.0)

    def used_fraction(self, quantile: float) -> float:
        """Return the fraction of `max_tokens` at `quantile` of the distribution."""
        return float(np.interp(quantile, self._cumulative(), self._edges))

    def _cumulative(self) -> Floats:
        """Return the cumulative distribution at the edges of the bins, [edges]."""
        cumulative: Floats = np.concatenate(([0.0], np.cumsum(self._weights / self._weights.sum())))
        return cumulative

    def tokens_left(self, num_output: Floats, max_tokens: Floats) -> Floats:
        """Return the tokens left to each sequence at each of QUANTILES, [num_seqs, quantiles], at least 1 each."""
        done = num_output / max_tokens
        cumulative = self._cumulative()
        past = np.interp(done, self._edges, cumulative)
        levels = past[:, None] + QUANTILES * (1.0 - past[:, None])
        ends: Floats = np.interp(levels, cumulative, self._edges)
        left: Floats = (ends - done[:, None]) * max_tokens[:, None]
        return np.maximum(left, 1.0)
