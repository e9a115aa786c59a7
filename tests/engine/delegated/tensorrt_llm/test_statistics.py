"""TensorRT-LLM's statistics and KV-cache events under our names."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.engine.delegated.tensorrt_llm.statistics import (
    IterationReader,
    follow,
    read_iteration_stats,
)
from sluice.engine.statistics import IterationStats
from tests.waiting import PATIENCE_S, until

WHOLE: dict[str, Any] = {
    "timestamp": "11-21-2026 10:20:30.250000",
    "iter": 7,
    "iterLatencyMS": 12.5,
    "numActiveRequests": 3,
    "maxNumActiveRequests": 64,
    "numQueuedRequests": 2,
    "gpuMemUsage": 100,
    "cpuMemUsage": 50,
    "pinnedMemUsage": 25,
    "kvCacheStats": {
        "maxNumBlocks": 8,
        "freeNumBlocks": 5,
        "usedNumBlocks": 3,
        "tokensPerBlock": 4,
        "reusedBlocks": 9,
        "missedBlocks": 1,
        "cacheHitRate": 0.9,
    },
    "inflightBatchingStats": {
        "numScheduledRequests": 3,
        "numContextRequests": 1,
        "numGenRequests": 2,
        "numPausedRequests": 1,
        "numCtxTokens": 40,
        "microBatchId": 0,
    },
    "specDecodingStats": {"numDraftTokens": 8, "numAcceptedTokens": 5, "acceptanceLength": 2.5},
    "schedulerMode": "overlap",
}


def test_all_fields_have_our_names() -> None:
    stats = read_iteration_stats(WHOLE)
    when = datetime(2026, 11, 21, 10, 20, 30, 250000).astimezone()
    assert stats == IterationStats(
        iteration=7,
        latency_ms=12.5,
        timestamp_us=round(when.timestamp() * 1e6),
        num_active=3,
        max_active=64,
        num_scheduled=3,
        num_context=1,
        num_generation=2,
        num_paused=1,
        num_queued=2,
        context_tokens=40,
        micro_batch_id=0,
        gpu_memory_bytes=100,
        cpu_memory_bytes=50,
        pinned_memory_bytes=25,
        max_blocks=8,
        free_blocks=5,
        used_blocks=3,
        tokens_per_block=4,
        reused_blocks=9,
        missed_blocks=1,
        cache_hit_rate=0.9,
        acceptance_length=2.5,
    )


def test_static_batches_and_nothing_at_all() -> None:
    static = read_iteration_stats(
        {"iter": 1, "inflightBatchingStats": None, "staticBatchingStats": {"numCtxTokens": 4}}
    )
    assert (static.context_tokens, static.num_generation) == (4, None)
    assert read_iteration_stats({}) == IterationStats(0, 0.0)
    assert read_iteration_stats({"timestamp": "soon"}).timestamp_us is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine the first text takes long
@given(st.dictionaries(st.sampled_from([*WHOLE]), JSON).map(lambda told: {**told, "iter": 1, "iterLatencyMS": None}))
def test_whatever_the_parts_are_they_do_no_harm(told: dict[str, Any]) -> None:
    stats = read_iteration_stats(json.loads(json.dumps(told)))
    assert stats.max_blocks is None or isinstance(stats.max_blocks, int | float)


def test_overlapping_iterations_last_from_one_to_the_next() -> None:
    reader = IterationReader()

    def seconds(iteration: int, timestamp: str | None) -> float:
        return reader.read({"iter": iteration, "iterLatencyMS": 20.0, "timestamp": timestamp}).seconds

    assert seconds(1, "11-21-2026 10:20:30.000000") == 0.02
    assert seconds(2, "11-21-2026 10:20:30.010000") == 0.01
    assert seconds(3, "11-21-2026 10:20:39.000000") == 0.02
    assert seconds(7, "11-21-2026 10:20:39.001000") == 0.02
    assert seconds(8, None) == 0.02


def test_drafts_are_told_with_an_iteration() -> None:
    iteration = IterationReader().read(WHOLE)
    assert (iteration.seconds, iteration.num_drafted, iteration.num_accepted) == (0.0125, 8, 5)
    assert IterationReader().read({}).num_drafted == 0


class Followed:
    """The library's own stream of statistics, and what `follow` took of it."""

    def __init__(self) -> None:
        self.stream = import_module("tensorrt_llm.executor.result").IterationResult()
        self.stream.set_timeout(0.01)
        self.is_busy = asyncio.Event()
        self.taken: list[int] = []
        self.has_taken = asyncio.Event()

    def take(self, entry: Mapping[str, Any]) -> None:
        self.taken.append(entry["iter"])
        self.has_taken.set()

    async def until_silent(self) -> None:
        """Wait until a silence has ended the stream."""
        await until(lambda: self.stream._done)


@pytest.fixture
async def followed(stand_in: ModuleType) -> AsyncIterator[Followed]:
    whole = Followed()
    task = asyncio.create_task(follow(lambda timeout: whole.stream, whole.take, whole.is_busy, "statistics"))
    yield whole
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def read_in_time(whole: Followed) -> AsyncIterator[None]:
    yield
    async with asyncio.timeout(PATIENCE_S):
        await whole.has_taken.wait()


async def test_statistics_go_on_after_a_silence_though_no_request_follows(followed: Followed) -> None:
    followed.is_busy.set()
    await followed.until_silent()
    async with read_in_time(followed):
        followed.stream._queue.put('{"iter": 1}')
    assert followed.taken == [1]


async def test_others_go_on_between_entries_that_came_together() -> None:
    order: list[str] = []

    async def source(_: float) -> AsyncIterator[dict[str, Any]]:
        for _ in range(3):
            yield {}

    async def other() -> None:
        order.append("other")

    def take(_: object) -> None:
        order.append("entry")
        others.append(asyncio.create_task(other()))

    others: list[asyncio.Task[None]] = []
    is_busy = asyncio.Event()
    is_busy.set()
    task = asyncio.create_task(follow(source, take, is_busy, "events"))
    await until(lambda: len(order) >= 6)
    task.cancel()
    assert order[:6] == ["entry", "other"] * 3


async def test_what_came_between_a_silence_and_the_end_of_work_is_read(followed: Followed) -> None:
    followed.is_busy.set()
    await followed.until_silent()
    async with read_in_time(followed):
        followed.stream._queue.put('{"iter": 1}')
        followed.is_busy.clear()
    assert followed.taken == [1]
