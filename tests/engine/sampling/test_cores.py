"""Rows shared by threads: each block once, and an exception of any thread is raised."""

import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from sluice.engine.sampling.cores import Cores, Work
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import SamplingParams
from tests.engine.sampling.host import sample

MANY = 2**30
"""A cost that is worth all cores."""
BLOCKS = [slice(begin, begin + 3) for begin in range(0, 300, 3)]


@pytest.fixture(params=[1, 2, 5])
def cores(request: pytest.FixtureRequest) -> Iterator[Cores]:
    some = Cores(request.param)
    yield some
    some.close()


def test_each_block_is_computed_once(cores: Cores) -> None:
    done: Counter[int] = Counter()
    for _ in range(20):
        cores.share(BLOCKS, MANY, lambda: lambda block: done.update([block.start]))
    assert done == {block.start: 20 for block in BLOCKS}


def test_threads_compute_at_the_same_time_each_with_memory_of_its_own() -> None:
    cores, met, began = Cores(2), threading.Barrier(2, timeout=30), []

    def work(block: slice) -> None:
        met.wait()

    def begin() -> Work:
        began.append(threading.current_thread().name)
        return work

    cores.share(BLOCKS[:2], MANY, begin)
    cores.close()
    assert len(set(began)) == 2


def test_few_numbers_stay_on_the_callers_thread(cores: Cores) -> None:
    on: set[str] = set()
    cores.share(BLOCKS, 1000, lambda: lambda block: on.add(threading.current_thread().name))
    assert on == {threading.current_thread().name}


def test_an_exception_is_raised_when_all_have_stopped(cores: Cores) -> None:
    def work(block: slice) -> None:
        if block.start == 30:
            raise ValueError("block 30")

    for _ in range(20):
        with pytest.raises(ValueError, match="block 30"):
            cores.share(BLOCKS, MANY, lambda: work)
    cores.share(BLOCKS, MANY, lambda: lambda block: None)


def test_several_cores_draw_what_one_draws(cores: Cores) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (24, 40_000)).astype(np.float32)
    logits[::2, :9] += 12
    fields: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"typical_p": 0.9}, {"min_p": 0.01}]
    wanted = [
        SamplingParams(max_tokens=9, temperature=0.9, seed=row, logprobs=3, **fields[row % 5])  # type: ignore[arg-type]
        for row in range(len(logits))
    ]
    states = [SamplingState(each, [1], frozenset(), logits.shape[1]) for each in wanted]
    alone, shared = sample(logits, states), sample(logits, states, cores=cores)
    assert alone.token_ids.tolist() == shared.token_ids.tolist()
    assert alone.logprobs == shared.logprobs
