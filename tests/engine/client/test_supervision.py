"""Which requests a crash is attributed to, which go first to the next engine, and which are abandoned."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.client.supervision import MAX_SHARED_CRASHES, AbandonedStreams, RecoveryQueue, build_resumed_request
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError


def take(queue: RecoveryQueue) -> tuple[int, ...]:
    """Take what is due, which the engine begins."""
    due = queue.take_due()
    for stream_id in due:
        queue.mark_begun(stream_id)
    return due


def running(*stream_ids: int) -> RecoveryQueue:
    """Return the queue of an engine that runs these streams, all proven."""
    queue = RecoveryQueue()
    for stream_id in stream_ids:
        queue.add(stream_id)
    assert take(queue) == stream_ids
    for stream_id in stream_ids:
        queue.mark_proven(stream_id)
    return queue


def add(queue: RecoveryQueue, stream_id: int) -> tuple[int, ...]:
    queue.add(stream_id)
    return take(queue)


def test_nothing_is_sent_while_there_is_no_engine() -> None:
    queue = running(1)
    queue.close()
    assert add(queue, 2) == ()
    assert queue.requeue_after_crash() == AbandonedStreams()
    assert not queue.is_sent(1)
    assert add(queue, 3) == ()
    assert not queue.is_open
    queue.open()
    assert take(queue) == (1, 2, 3)
    assert queue.is_open


def test_suspects_come_after_the_innocent_one_by_one_and_before_the_new() -> None:
    queue = running(1, 2)
    assert add(queue, 3) == (3,)
    assert add(queue, 4) == (4,)
    queue.requeue_after_crash()
    assert add(queue, 5) == ()
    queue.open()
    assert take(queue) == (1, 2)
    queue.mark_proven(1)
    assert take(queue) == (), "2 has not proven itself"
    queue.mark_proven(2)
    assert take(queue) == (3,)
    assert take(queue) == ()
    assert add(queue, 6) == ()
    queue.mark_proven(3)
    assert take(queue) == (4,)
    queue.remove(4)  # the client left
    assert take(queue) == (5, 6)
    assert queue.is_open


def test_a_guilty_one_is_not_sent_again_even_before_it_is_dropped() -> None:
    queue = RecoveryQueue()
    add(queue, 1)
    queue.requeue_after_crash()
    queue.open()
    assert take(queue) == (1,)
    assert queue.requeue_after_crash().poisonous == (1,)
    queue.open()
    assert take(queue) == ()


def test_several_suspects_of_a_second_crash_are_told_apart_by_the_third() -> None:
    queue = running(1, 2, 3)
    queue.requeue_after_crash()
    queue.open()
    assert take(queue) == (1, 2, 3)
    assert queue.requeue_after_crash() == AbandonedStreams(), "three suspects: nobody can be named"
    queue.open()
    assert take(queue) == (1,)
    queue.mark_proven(1)
    assert take(queue) == (2,)
    assert queue.requeue_after_crash() == AbandonedStreams(poisonous=(2,))
    queue.remove(2)
    queue.open()
    assert take(queue) == (1,)
    queue.mark_proven(1)
    assert take(queue) == (3,)


def test_who_brings_a_token_is_cleared_of_suspicion() -> None:
    queue = RecoveryQueue()
    add(queue, 1)
    for _ in range(3):
        assert queue.requeue_after_crash() == AbandonedStreams()
        queue.open()
        assert take(queue) == (1,)
        queue.mark_proven(1)
        assert queue.requeue_after_crash() == AbandonedStreams(), "nobody is suspect"
        queue.open()
        assert take(queue) == (1,)


def test_a_probe_that_the_engine_had_not_begun_is_not_blamed() -> None:
    """Another client's request, which was probed before it, has crashed the engine again."""
    queue = RecoveryQueue()
    add(queue, 1)
    for _ in range(3):
        assert queue.requeue_after_crash() == AbandonedStreams()
        queue.open()
        assert queue.take_due() == (1,)
        assert queue.take_due() == ()
    queue.mark_begun(1)
    assert queue.requeue_after_crash() == AbandonedStreams(poisonous=(1,))


def test_crashes_that_cannot_be_laid_on_anyone_are_forgiven_for_long_but_not_for_ever() -> None:
    crowd = tuple(range(32))
    queue = running(*crowd)
    for _ in range(MAX_SHARED_CRASHES - 1):
        assert queue.requeue_after_crash() == AbandonedStreams()
        queue.open()
        assert take(queue) == crowd
        for stream_id in crowd:
            queue.mark_proven(stream_id)
    assert queue.requeue_after_crash() == AbandonedStreams(exhausted=crowd)


def test_an_engine_lost_before_it_got_anything_leaves_everybody_as_they_were() -> None:
    queue = running(1)
    add(queue, 2)
    queue.requeue_after_crash()
    assert queue.requeue_after_crash() == AbandonedStreams()
    queue.open()
    assert take(queue) == (1,)
    queue.mark_proven(1)
    assert take(queue) == (2,)


OPERATIONS = st.lists(st.tuples(st.sampled_from(("add", "begin", "prove", "drop", "crash", "open")), st.integers(0, 7)))


@given(OPERATIONS)
def test_nobody_is_lost_or_sent_twice_whatever_happens(operations: list[tuple[str, int]]) -> None:
    queue, live, sent = RecoveryQueue(), set[int](), set[int]()

    def send() -> None:
        due = queue.take_due()
        assert not sent & {*due}, "sent twice to one engine"
        assert live >= {*due}, "sent after its end"
        sent.update(due)

    for action, stream_id in operations:
        if action == "add" and stream_id not in live:
            live.add(stream_id)
            queue.add(stream_id)
        elif action == "begin":
            queue.mark_begun(stream_id)
        elif action == "prove" and stream_id in sent:
            queue.mark_proven(stream_id)
        elif action == "drop":
            live.discard(stream_id)
            sent.discard(stream_id)
            queue.remove(stream_id)
        elif action == "crash":
            abandoned = queue.requeue_after_crash()
            sent.clear()
            for each in (*abandoned.poisonous, *abandoned.exhausted):
                live.discard(each)
                queue.remove(each)
        elif action == "open":
            queue.open()
        send()
    queue.open()
    for _ in range(len(live) + 1):
        send()
        for stream_id in sent:
            queue.mark_proven(stream_id)
    assert sent == live


# -- what the next engine is asked


REQUEST = GenerateRequest(
    request_id="r",
    prompt_token_ids=[1, 2],
    sampling=SamplingParams(max_tokens=9, seed=5, prompt_logprobs=2, logprobs=1),
    timeout_s=10.0,
    queue_timeout_s=4.0,
    tenant="t",
)


def test_a_resumption_has_the_tokens_sent_and_the_time_left() -> None:
    resumed = build_resumed_request(REQUEST, [7, 8], 3.0, has_started=True)
    sampling = msgspec.structs.replace(REQUEST.sampling, prompt_logprobs=None)
    expected = {"sampling": sampling, "resume_token_ids": [7, 8], "timeout_s": 7.0, "queue_timeout_s": None}
    assert resumed == msgspec.structs.replace(REQUEST, **expected)


def test_one_that_had_nothing_yet_is_asked_as_before() -> None:
    resumed = build_resumed_request(REQUEST, [], 1.0, has_started=False)
    assert resumed == msgspec.structs.replace(REQUEST, timeout_s=9.0, queue_timeout_s=3.0)


@pytest.mark.parametrize(("elapsed_s", "has_started"), [(10.0, True), (4.5, False)])
def test_one_whose_time_is_over_is_not_asked(elapsed_s: float, has_started: bool) -> None:
    with pytest.raises(SluiceError) as caught:
        build_resumed_request(REQUEST, [], elapsed_s, has_started)
    assert caught.value.code is ErrorCode.DEADLINE


# -- streams that move to another engine


def test_suspects_are_probed_in_another_engine_one_by_one_and_before_the_new() -> None:
    lost, other = running(), running(8)
    assert add(lost, 1) + add(lost, 2) == (1, 2)
    lost.requeue_after_crash()
    for stream_id in (1, 2):
        other.adopt(stream_id, lost.release(stream_id))
    assert not other.is_open
    assert take(other) == (1,)
    assert add(other, 9) == ()
    other.mark_proven(1)
    assert take(other) == (2,)
    other.mark_proven(2)
    assert take(other) == (9,)


def test_nothing_is_sent_beside_a_probe_that_would_be_suspected_with_it() -> None:
    first, second, third = running(), running(8), running(5)
    add(first, 1)
    first.requeue_after_crash()
    second.adopt(1, first.release(1))
    assert take(second) == (1,)
    third.requeue_after_crash()
    second.adopt(5, third.release(5))
    assert take(second) == ()
    second.mark_proven(1)
    assert take(second) == (5,)


def test_crashes_without_a_suspect_are_counted_over_engines() -> None:
    queue = running(1)
    for _ in range(MAX_SHARED_CRASHES - 1):
        assert queue.requeue_after_crash() == AbandonedStreams()
        following = running()
        following.adopt(1, queue.release(1))
        assert take(following) == (1,)
        following.mark_proven(1)
        queue = following
    assert queue.requeue_after_crash() == AbandonedStreams(exhausted=(1,))


def test_new_streams_wait_behind_the_probes_of_the_engine_that_they_move_to() -> None:
    first, second, third = running(), running(), running()
    add(first, 1)
    first.requeue_after_crash()
    second.adopt(1, first.release(1))
    third.close()
    assert add(third, 7) == ()
    second.adopt(7, third.release(7))
    assert take(second) == (1,)
    second.mark_proven(1)
    assert take(second) == (7,)


@given(st.lists(st.tuples(st.sampled_from(["add", "prove", "crash", "end"]), st.integers(0, 2), st.integers(0, 9))))
def test_over_three_engines_nobody_is_lost_or_in_two_and_poison_reaches_two(
    actions: list[tuple[str, int, int]],
) -> None:
    """Whatever happens, each stream is in one engine's queue, and stream 0, which crashes whatever begins it, takes at
    most two engines with it."""
    queues = [RecoveryQueue() for _ in range(3)]
    home: dict[int, int] = {}
    num_crashes = 0

    def forward(number: int) -> None:
        for stream_id in take(queues[number]):
            assert home[stream_id] == number
            if stream_id == 0:
                crash(number, is_poisoned=True)
                return

    def crash(number: int, *, is_poisoned: bool = False) -> None:
        nonlocal num_crashes
        num_crashes += is_poisoned
        lost, target = queues[number], (number + 1) % 3
        abandoned = lost.requeue_after_crash()
        for stream_id in (*abandoned.poisonous, *abandoned.exhausted):
            lost.remove(stream_id)
            del home[stream_id]
        for stream_id in [each for each, place in home.items() if place == number]:
            home[stream_id] = target
            queues[target].adopt(stream_id, lost.release(stream_id))
        lost.open()
        forward(target)

    for action, number, stream_id in actions:
        place = home.get(stream_id)
        if action == "add" and place is None and (stream_id or not num_crashes):
            home[stream_id] = number
            queues[number].add(stream_id)
        elif action == "prove" and place is not None and stream_id:
            queues[place].mark_proven(stream_id)
        elif action == "end" and place is not None:
            queues[place].remove(stream_id)
            del home[stream_id]
        elif action == "crash":
            crash(number)
        for each in range(3):
            forward(each)
    assert num_crashes <= 2
    for _ in range(40):  # all others are served in the end
        for stream_id, place in list(home.items()):
            queues[place].mark_proven(stream_id)
        for each in range(3):
            forward(each)
    assert all(queues[place].is_sent(stream_id) for stream_id, place in home.items())
