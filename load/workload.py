"""What will be asked and when, fixed by the seed alone."""

import itertools
from collections.abc import Iterator

import numpy as np

from load.config import Arrival, Pace, Workload
from load.prompts import PromptSource
from load.stream import PlannedRequest

WARMUP_STREAM, REQUEST_STREAM, ARRIVAL_STREAM = range(3)
"""Independent random streams of one seed, so that none shifts with the length of another."""


def planned_requests(
    workload: Workload, prompts: PromptSource, stream: int = REQUEST_STREAM
) -> Iterator[PlannedRequest]:
    """Requests without end. Request i is the same whatever came before it."""
    for index in itertools.count():
        rng = np.random.default_rng((workload.seed, stream, index))
        prompt_tokens = int(rng.integers(workload.prompt_tokens.low, workload.prompt_tokens.high, endpoint=True))
        output_tokens = int(rng.integers(workload.output_tokens.low, workload.output_tokens.high, endpoint=True))
        yield PlannedRequest(index, prompts.make(rng, prompt_tokens), prompt_tokens, output_tokens)


def arrival_offsets(rate: float, arrival: Arrival, seed: int) -> Iterator[float]:
    """Seconds from the run's start to each intended send, `rate` a second on average; the first is 0."""
    rng = np.random.default_rng((seed, ARRIVAL_STREAM))
    offset = 0.0
    while True:
        yield offset
        offset += 1.0 / rate if arrival is Arrival.CONSTANT else float(rng.exponential(1.0 / rate))


def requests_for(pace: Pace, requests: Iterator[PlannedRequest]) -> Iterator[PlannedRequest]:
    """As many as the pace wants. A known number is made now, to keep that work out of the measurement."""
    return requests if pace.num_requests is None else iter(list(itertools.islice(requests, pace.num_requests)))
