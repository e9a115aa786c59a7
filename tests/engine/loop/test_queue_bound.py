"""`max_queued_requests` bounds what waits: requests that the next step cannot take, for want of places or of blocks."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.config import SchedulerPolicy
from sluice.errors import ErrorCode
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import ScriptedExecutor

BLOCK_SIZE = 4


def bench(num_blocks: int, max_queued_requests: int, **limits: object) -> ScriptedExecutor:
    runner = EchoRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=64)
    return ScriptedExecutor(runner, None, max_queued_requests=max_queued_requests, **limits)


def num_held_back(it: ScriptedExecutor) -> int:
    """Return how many requests wait that have not run yet and that the next step does not take."""
    queue = it.executor._intake.queue
    num_preempted = sum(each.was_preempted for each in queue)
    return len(queue) - max(it.executor._count_started(queue), num_preempted)


def test_places_that_no_blocks_are_left_for_are_no_room_in_the_queue() -> None:
    """Each request needs half of the blocks, so that two run, though 32 may."""
    it = bench(8, 4, max_num_seqs=32, max_num_batched_tokens=32)
    for stream_id in range(40):
        it.submit(stream_id, [stream_id] * 8, max_tokens=8)
    for _ in range(3):
        it.step()
    stats = it.executor.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 4)
    assert [failure.stream_id for failure in it.failures] == list(range(6, 40))
    assert {failure.code for failure in it.failures} == {ErrorCode.OVERLOADED}
    assert "4 requests wait and the limit is 4 (--max-queue-size)" in it.failures[0].message
    it.finish()
    assert all(it.tokens[each] == echo([each] * 8, 8) for each in range(6))


def test_a_batch_that_must_end_first_leaves_no_room_beside_it() -> None:
    it = bench(64, 2, max_num_seqs=8, scheduler_policy=SchedulerPolicy.STATIC_BATCH)
    it.submit(0, [0], max_tokens=8)
    it.step()
    for stream_id in range(1, 6):
        it.submit(stream_id, [stream_id], max_tokens=2)
    it.step()
    assert [failure.stream_id for failure in it.failures] == [3, 4, 5]


def test_without_a_queue_what_starts_at_once_is_served() -> None:
    it = bench(6, 0, max_num_seqs=8)
    for stream_id in range(4):
        it.submit(stream_id, [stream_id], max_tokens=7)
    it.step()
    assert [failure.stream_id for failure in it.failures] == [3], "each needs two of six blocks"


def test_who_waits_to_share_a_prefix_that_is_being_computed_starts_at_once_for_the_queue() -> None:
    it = bench(24, 0, max_num_seqs=8, max_num_batched_tokens=8)
    it.submit(0, [7] * 20, max_tokens=4)
    it.step()
    it.submit(1, [7] * 20, max_tokens=4)
    it.finish()
    assert not it.failures and it.tokens[1] == it.tokens[0]


def test_prompt_tokens_count_where_blocks_are_short_though_places_are_free() -> None:
    it = bench(4, 9, max_num_seqs=8, max_queued_tokens=10)
    for stream_id in range(4):
        it.submit(stream_id, [stream_id] * 6, max_tokens=11)
    it.step()
    assert [failure.stream_id for failure in it.failures] == [1, 2, 3]
    assert "(--max-queue-tokens)" in it.failures[0].message


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    step: int
    copies: int
    """Answers to the same prompt, as `n` asks for."""
    priority: int
    tenant: str


arrivals = st.lists(
    st.builds(
        Arrival,
        st.lists(st.integers(0, 3), min_size=1, max_size=16).map(tuple),
        st.integers(1, 16),
        st.integers(0, 30),
        st.sampled_from([1, 1, 1, 4]),
        st.integers(0, 2),
        st.sampled_from("abc"),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("policy", SchedulerPolicy)
@settings(max_examples=20)
@given(arrivals, st.integers(8, 20), st.integers(1, 5), st.integers(0, 4))
def test_no_more_wait_than_may_and_nobody_is_refused_while_fewer_do(
    policy: SchedulerPolicy, asked: SequenceOf[Arrival], num_blocks: int, places: int, limit: int
) -> None:
    it = bench(num_blocks, limit, max_num_seqs=places, scheduler_policy=policy)
    num_sent = 0
    for step in range(31):
        num_waiting, num_new = it.executor.stats().num_waiting, 0
        for each in asked:
            if each.step == step:
                for _ in range(each.copies):
                    fields = {"max_tokens": each.max_tokens, "priority": each.priority, "tenant": each.tenant}
                    it.submit(num_sent, list(each.prompt), **fields)
                    num_sent, num_new = num_sent + 1, num_new + 1
        num_refused = len(it.failures)
        it.step()
        assert num_held_back(it) <= limit
        assert len(it.failures) == num_refused or num_waiting + num_new > limit
    it.finish()
    assert sum(map(len, it.reasons.values())) + len(it.failures) == num_sent
