"""Counts of many gaps in bins, whose quantiles are exact to half a percent."""

from collections.abc import Sequence

import numpy as np

SHORTEST_S, BINS_PER_E = 1e-6, 200
NUM_BINS = 4096
"""The bins reach from a microsecond to about ten minutes, each half a percent longer than the last."""


class GapCounts:
    """How often gaps of each length came."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, np.int64)
        self._sum_s = 0.0
        self.longest_s = 0.0

    @property
    def num_gaps(self) -> int:
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        return self._sum_s / max(self.num_gaps, 1)

    def add(self, gaps_s: Sequence[float], counts: Sequence[int]) -> float:
        """Count a sequence's gaps, each as often as `counts` says. Returns their own 99th percentile, 0 without any."""
        if not len(gaps_s):
            return 0.0
        gaps, times = np.array(gaps_s), np.array(counts)
        bins = (np.log(np.maximum(gaps, SHORTEST_S) / SHORTEST_S) * BINS_PER_E).astype(np.int64)
        np.add.at(self._counts, np.minimum(bins, NUM_BINS - 1), times)
        self._sum_s += float(gaps @ times)
        self.longest_s = max(self.longest_s, float(gaps.max()))
        order = np.argsort(gaps)
        reached = np.cumsum(times[order])
        return float(gaps[order][np.searchsorted(reached, 0.99 * reached[-1])])

    def quantile(self, part: float) -> float:
        """Return the gap in seconds that a part of all gaps does not exceed; NaN without any."""
        reached = np.cumsum(self._counts)
        if not reached[-1]:
            return float("nan")
        place = int(np.searchsorted(reached, max(part * reached[-1], 1)))
        return min(SHORTEST_S * float(np.exp((place + 0.5) / BINS_PER_E)), self.longest_s)
