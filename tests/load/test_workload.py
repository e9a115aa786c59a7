from itertools import islice

import numpy as np
import pytest

from load.config import Arrival, Pace, TokenRange, Workload
from load.prompts import TokenIds
from load.stream import PlannedRequest
from load.workload import WARMUP_STREAM, arrival_offsets, planned_requests, requests_for

WORKLOAD = Workload(TokenRange(32, 256), TokenRange(64, 192), seed=3)


def plan(count: int, workload: Workload = WORKLOAD, **stream: int) -> list[PlannedRequest]:
    return list(islice(planned_requests(workload, TokenIds(100), **stream), count))


def test_the_seed_alone_decides() -> None:
    assert plan(20) == plan(20)
    assert plan(20) != plan(20, Workload(TokenRange(32, 256), TokenRange(64, 192), seed=4))


def test_warmup_asks_other_prompts_than_the_run() -> None:
    assert not {str(r.prompt) for r in plan(10)} & {str(r.prompt) for r in plan(10, stream=WARMUP_STREAM)}


def test_lengths_fill_their_ranges_and_prompts_have_them() -> None:
    requests = plan(2000)
    assert {r.prompt_tokens for r in requests} == set(range(32, 257))
    assert {r.output_tokens for r in requests} == set(range(64, 193))
    assert all(len(r.prompt) == r.prompt_tokens for r in requests)


def test_a_number_of_requests_ends_the_plan() -> None:
    requests = planned_requests(WORKLOAD, TokenIds(100))
    assert [r.index for r in requests_for(Pace(concurrency=1, num_requests=3), requests)] == [0, 1, 2]


def test_constant_arrivals() -> None:
    assert list(islice(arrival_offsets(4.0, Arrival.CONSTANT, 0), 3)) == [0.0, 0.25, 0.5]


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    gaps = np.diff(list(islice(arrival_offsets(4.0, Arrival.POISSON, 0), 20_001)))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
