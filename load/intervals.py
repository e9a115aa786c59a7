"""Intervals of confidence: how far a percentile could be off, had other requests of the same kind been sent.

Requests are drawn anew, with all their samples (a bootstrap over clusters). The gaps of one stream depend on each
other, so that to draw gaps by themselves would give intervals that are too narrow.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.load.stream import RequestResult
from sluice.load.summary import gaps_s

CONFIDENCE = 0.95
MOST_DRAWS, LEAST_DRAWS = 1000, 100
_MOST_WORK = 40_000_000
"""RequestSamples to go through over all draws; more samples get fewer draws."""

Floats = NDArray[np.float64]


class ConfidenceInterval(NamedTuple):
    """The bounds between which a figure lies with a probability of 95 %."""

    low: float
    high: float


class RequestSamples:
    """RequestSamples of a figure, with the request that each belongs to.

    `values` are the samples, `owners` the numbers of their requests, from 0 to below `num_requests`.
    """

    def __init__(self, values: Sequence[float] | Floats, owners: Sequence[int], num_requests: int) -> None:
        unsorted = np.asarray(values, np.float64)
        order = np.argsort(unsorted, kind="stable")
        self.values = unsorted[order]
        self._owners = np.asarray(owners, np.intp)[order]
        self._num_requests = num_requests

    def percentile(self, percent: float) -> float:
        """Return a percentile, without drawing."""
        return float(np.percentile(self.values, percent))

    def draw_percentiles(self, percents: Sequence[float], seed: int) -> Floats:
        """Return the percentiles of each draw: [draws, percents]. The same seed draws the same requests."""
        rng = np.random.default_rng(seed)
        num_draws = int(np.clip(_MOST_WORK // max(len(self.values), 1), LEAST_DRAWS, MOST_DRAWS))
        parts = np.asarray(percents) / 100.0
        drawn = np.empty((num_draws, len(parts)))
        for number in range(num_draws):
            times = np.bincount(rng.integers(0, self._num_requests, self._num_requests), minlength=self._num_requests)
            cumulated = np.cumsum(times[self._owners])
            if not cumulated[-1]:  # only requests without a sample were drawn
                drawn[number] = np.nan
                continue
            places = np.searchsorted(cumulated, parts * cumulated[-1], side="left")
            drawn[number] = self.values[np.minimum(places, len(self.values) - 1)]
        return drawn

    def intervals(self, percents: Sequence[float], seed: int = 0) -> list[ConfidenceInterval]:
        """Return the interval of each percentile."""
        return [bounds(column) for column in self.draw_percentiles(percents, seed).T]


def bounds(drawn: Floats) -> ConfidenceInterval:
    """Return the interval that holds the middle 95 % of what was drawn."""
    tail = (1.0 - CONFIDENCE) / 2 * 100.0
    low, high = np.nanpercentile(drawn, (tail, 100.0 - tail)).tolist()
    return ConfidenceInterval(low, high)


def latency_samples(results: Sequence[RequestResult]) -> dict[str, RequestSamples]:
    """Return the samples of each latency, in milliseconds, of the served requests; only latencies that have any."""
    served = [result for result in results if result.is_ok]
    of_request: dict[str, Callable[[RequestResult], Sequence[float | None]]] = {
        "TTFT": lambda result: (result.ttft_s,),
        "ITL": gaps_s,
        "TPOT": lambda result: (result.tpot_s,),
        "E2E": lambda result: (result.e2e_s,),
    }
    found = {}
    for name, measure in of_request.items():
        pairs = [
            (value * 1e3, number)
            for number, result in enumerate(served)
            for value in measure(result)
            if value is not None
        ]
        if pairs:
            values, owners = zip(*pairs, strict=True)
            found[name] = RequestSamples(values, owners, len(served))
    return found
