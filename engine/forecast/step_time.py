"""How long a step takes, learned from those that ran."""

MEMORY = 1.0 - 1.0 / 512
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
        self._weight = self._weight * MEMORY + 1.0
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
