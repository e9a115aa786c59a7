import json
from datetime import datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.loop.books import SILENCE_S, Books
from engine.delegated.tensorrt_llm.loop.kv_events import CachedBlocks
from engine.delegated.tensorrt_llm.loop.pace import Pace, Step
from engine.delegated.tensorrt_llm.loop.sequence import LlmSequence
from engine.delegated.tensorrt_llm.loop.statistics import StepTimes, iteration_stats, timestamp_us
from engine.forecast.wait import WaitForecast
from engine.types import GenerateRequest, IterationStats, SamplingParams
from tests.engine.delegated.tensorrt_llm.loop.test_events import INFO

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
    stats = iteration_stats(WHOLE)
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
    static = iteration_stats({"iter": 1, "inflightBatchingStats": None, "staticBatchingStats": {"numCtxTokens": 4}})
    assert (static.context_tokens, static.num_generation) == (4, None)
    assert iteration_stats({}) == IterationStats(0, 0.0)
    assert timestamp_us("soon") is None
    assert timestamp_us(None) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*WHOLE]), JSON).map(lambda told: {**told, "iter": 1, "iterLatencyMS": None}))
def test_whatever_the_parts_are_they_do_no_harm(told: dict[str, Any]) -> None:
    stats = iteration_stats(json.loads(json.dumps(told)))
    assert stats.max_blocks is None or isinstance(stats.max_blocks, int | float)


def at(iteration: int, latency_ms: float, timestamp: int | None) -> IterationStats:
    return IterationStats(iteration, latency_ms, timestamp)


def test_overlapping_iterations_last_from_one_to_the_next() -> None:
    times = StepTimes()
    assert times.seconds(at(1, 20.0, 1_000_000)) == 0.02
    assert times.seconds(at(2, 20.0, 1_010_000)) == 0.01
    assert times.seconds(at(3, 20.0, 9_000_000)) == 0.02
    assert times.seconds(at(7, 20.0, 9_001_000)) == 0.02
    assert times.seconds(at(8, 20.0, None)) == 0.02


def test_steps_are_told_by_second_tokens() -> None:
    pace = Pace()
    assert [pace.observe(stream, 1, now) for stream, now in ((1, 0.0), (2, 0.01), (1, 0.5), (2, 0.51))] == [None] * 4
    assert pace.observe(2, 1, 1.0) == Step(2, 2, 0.5)
    pace.rest()
    assert pace.observe(2, 1, 9.0) is None
    assert pace.observe(2, 1, 9.5) is None
    assert pace.observe(2, 1, 9.75) == Step(1, 1, 0.25)


def sequence(stream_id: int) -> LlmSequence:
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=5))
    return LlmSequence(stream_id, request, INFO, None, 0.0, 0.0)


def test_tokens_tell_the_time_where_statistics_do_not() -> None:
    books = Books(INFO, WaitForecast(INFO), None, 0.0)
    one = sequence(1)
    for number, now in enumerate((0.0, 0.1, 0.2, 0.3)):
        books.take_tokens(one, 1, now)
        one.num_output = number + 1
    books.take_prompt(one, 1)
    assert (books.counters.prompt_tokens, books.counters.cached_tokens) == (2, 1)
    assert (books.counters.generation_tokens, books.counters.steps) == (4, 2)
    assert books.blocks_used([one]) == 2
    assert books.blocks_used([]) == 0


def test_statistics_tell_the_time_until_they_stop() -> None:
    books = Books(INFO, WaitForecast(INFO), iteration_stats(WHOLE), 0.0)
    one = sequence(1)
    for now in (0.0, 0.1, 0.2):
        books.take_tokens(one, 1, now)
    assert books.counters.steps == 0
    books.take_iteration(WHOLE, 0.3)
    assert (books.counters.steps, books.counters.runner_seconds) == (1, 0.0125)
    assert (books.counters.draft_tokens, books.counters.accepted_tokens, books.counters.preemptions) == (8, 5, 1)
    assert books.blocks_used([one]) == 3
    books.take_tokens(one, 1, 0.4 + SILENCE_S)
    assert books.counters.steps == 2
    assert EngineConfig(model_path="").max_num_seqs == 64


def stored(*hashes: int, level: int = 0, window: int = 100) -> dict[str, Any]:
    blocks = [{"block_hash": each, "tokens": [], "cache_level": level, "priority": 35} for each in hashes]
    return {"event_id": 1, "window_size": window, "data": {"type": "stored", "parent_hash": None, "blocks": blocks}}


def test_blocks_that_can_be_found_again() -> None:
    cached = CachedBlocks()
    for event in (
        {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [8, 0]}},
        stored(1, 2, 3),
        stored(2, 4),
        stored(9, level=1),
        {"data": {"type": "removed", "block_hashes": [1, 77]}, "window_size": 100},
        {
            "data": {"type": "updated", "block_hash": 3, "cache_level": {"old_value": 0, "new_value": 1}},
            "window_size": 100,
        },
        {
            "data": {"type": "updated", "block_hash": 4, "priority": {"old_value": 0, "new_value": 1}},
            "window_size": 100,
        },
        {"data": None},
        {"data": {"type": "what comes later"}},
    ):
        cached.observe(event)
    assert len(cached) == 2
    cached.observe(stored(2, window=50))
    assert len(cached) == 3
