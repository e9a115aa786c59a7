import asyncio
import random
from time import perf_counter_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.plan import BatchPolicy, QueuePolicy, read_batch_policy
from sluice.serving.batching.queue import JobQueue, QueuedJob, Wakeup
from sluice.serving.job import InferJob
from tests.serving.batching.parts import HeldInstance, config_of, model_of, request, turns
from tests.waiting import PATIENCE_S


def job(name: str, priority: int = 0, timeout_us: int = 0) -> InferJob:
    return InferJob(MODEL, request(name, priority=priority, timeout_us=timeout_us), lambda response: None)


MODEL = model_of("", HeldInstance())


def ids(jobs: list[InferJob]) -> list[str]:
    return [each.request.id for each in jobs]


def queued_ids(queue: JobQueue) -> list[str]:
    return [each.job.request.id for each in queue]


def test_priorities_come_first_then_arrival() -> None:
    queue = JobQueue(BatchPolicy(num_priorities=3, default_priority=2))
    for name, priority in (("a", 3), ("b", 0), ("c", 1), ("d", 2), ("e", 7), ("f", 1)):
        queue.add(job(name, priority), None, 0)
    assert queued_ids(queue) == ["c", "f", "b", "d", "e", "a"]
    assert ids(queue.take(4)) == ["c", "f", "b", "d"]
    assert len(queue) == 2


def test_a_full_queue_refuses_by_priority() -> None:
    queue = JobQueue(BatchPolicy(num_priorities=2, default_priority=1, queues={2: QueuePolicy(max_size=1)}))
    queue.add(job("a", 2), None, 0)
    queue.add(job("b", 1), None, 0)
    with pytest.raises(SluiceError) as caught:
        queue.add(job("c", 2), None, 0)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.message == "[request id: c] Exceeds maximum queue size"
    queue.take(2)
    queue.add(job("d", 2), None, 0)


def test_expired_are_refused_or_go_behind_those_in_time() -> None:
    refusing = JobQueue(BatchPolicy(default_queue=QueuePolicy(timeout_ns=1000)))
    delaying = JobQueue(BatchPolicy(default_queue=QueuePolicy(timeout_ns=1000, delays_expired=True)))
    for queue in (refusing, delaying):
        queue.add(job("a"), None, 0)
        queue.add(job("b"), None, 500)
        assert queue.next_deadline_ns() == 1000
        assert queue.expire(999) == []
    assert ids(refusing.expire(1000)) == ["a"]
    assert queued_ids(refusing) == ["b"]
    assert delaying.expire(1000) == []
    assert queued_ids(delaying) == ["b", "a"]
    assert ids(delaying.take(9)) == ["b", "a"]
    assert len(delaying) == 0
    assert delaying.next_deadline_ns() == 0


@pytest.mark.parametrize(
    ("policy", "own_us", "deadline_ns"),
    [
        (QueuePolicy(timeout_ns=5000), 1, 5000),
        (QueuePolicy(timeout_ns=5000, allows_override=True), 1, 1000),
        (QueuePolicy(timeout_ns=5000, allows_override=True), 9, 5000),
        (QueuePolicy(timeout_ns=5000, allows_override=True), 0, 5000),
        (QueuePolicy(allows_override=True), 2, 2000),
        (QueuePolicy(), 2, 0),
    ],
)
def test_a_request_may_only_shorten_its_wait(policy: QueuePolicy, own_us: int, deadline_ns: int) -> None:
    assert policy.deadline_ns(request("a", timeout_us=own_us), 0) == deadline_ns


def test_the_configuration_is_read() -> None:
    policy = read_batch_policy(
        config_of("""dynamic_batching {
            preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 preserve_ordering: true
            priority_levels: 3 default_priority_level: 2
            default_queue_policy { default_timeout_microseconds: 30 allow_timeout_override: true }
            priority_queue_policy { key: 3 value { timeout_action: DELAY max_queue_size: 5 } }
        }""")
    )
    assert policy.preferred_rows == {4, 8}
    assert (policy.max_rows, policy.max_preferred_rows, policy.delay_ns) == (8, 8, 100_000)
    assert policy.preserves_order
    assert (policy.num_priorities, policy.default_priority) == (3, 2)
    assert policy.queue_of(1) == QueuePolicy(0, 30_000, False, True)
    assert policy.queue_of(3) == QueuePolicy(5, 0, True, False)
    assert read_batch_policy(config_of("dynamic_batching { }")).preferred_rows == {8}
    assert not read_batch_policy(config_of()).is_dynamic


def test_deadlines_of_requests_long_gone_are_not_kept() -> None:
    queue = JobQueue(BatchPolicy(default_queue=QueuePolicy(timeout_ns=10**9, allows_override=True)))
    queue.add(job("first", timeout_us=1), None, 0)
    for number in range(1000):
        queue.remove(queue.add(job(str(number)), None, 0))
    assert len(queue._deadlines) < 100


@pytest.mark.parametrize("seed", range(3))
def test_after_a_sweep_requests_still_expire_in_the_order_of_their_deadlines(seed: int) -> None:
    queue = JobQueue(BatchPolicy(default_queue=QueuePolicy(allows_override=True)))
    chance = random.Random(seed)
    timeouts_us = chance.sample(range(1, 10_000), 400)
    staying = set(chance.sample(timeouts_us, 40))
    for timeout_us in timeouts_us:
        queued = queue.add(job(str(timeout_us), timeout_us=timeout_us), None, 0)
        if timeout_us not in staying:
            queue.remove(queued)
    for timeout_us in sorted(staying):
        assert queue.next_deadline_ns() == timeout_us * 1000
        assert ids(queue.expire(timeout_us * 1000)) == [str(timeout_us)]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("expire"), st.integers(1, 40)),
    ),
    max_size=60,
)


@given(actions, st.booleans())
def test_every_job_leaves_exactly_once(steps: list[tuple[str, int]], delays: bool) -> None:
    policy = QueuePolicy(timeout_ns=50, delays_expired=delays)
    queue = JobQueue(BatchPolicy(num_priorities=2, default_priority=2, queues={1: policy}))
    added: list[InferJob] = []
    left: list[InferJob] = []
    inside: dict[InferJob, QueuedJob] = {}
    now = 0
    for action, number in steps:
        gone: list[InferJob] = []
        if action == "add":
            new = job(str(len(added)), priority=number)
            added.append(new)
            inside[new] = queue.add(new, None, now)
        elif action == "take":
            expected = [each.job for each in queue][:number]
            gone = queue.take(number)
            assert gone == expected
        elif action == "remove" and inside:
            gone = [list(inside)[number % len(inside)]]
            queue.remove(inside[gone[0]])
        elif action == "expire":
            now += number
            gone = queue.expire(now)
        left += gone
        for each in gone:
            del inside[each]
        assert len(queue) == len(inside) == len(list(queue))
        assert {each.job for each in queue} == set(inside)
        assert queue.next_deadline_ns() == 0 or queue.next_deadline_ns() > now
    left += queue.take(len(queue))
    assert sorted(map(id, left)) == sorted(map(id, added))


MS = 1_000_000


class Woken:
    """Keeps when it was woken. Asks again until `due_ns`, as a queue does."""

    def __init__(self, due_ns: int = 0) -> None:
        self.times: list[int] = []
        self.due_ns = due_ns
        self.wakeup = Wakeup(self.wake)
        self._is_due = asyncio.Event()

    def wake(self) -> None:
        self.times.append(perf_counter_ns())
        if self.times[-1] < self.due_ns:
            self.wakeup.at(self.due_ns)
        else:
            self._is_due.set()

    async def wait(self) -> int:
        """When it was due. Leaves the event loop to wait by itself, which is what rounds timers."""
        async with asyncio.timeout(PATIENCE_S):
            await self._is_due.wait()
        return self.times[-1]


async def test_the_nearest_time_counts() -> None:
    woken = Woken()
    begun = perf_counter_ns()
    woken.wakeup.at(begun + 60_000 * MS)
    woken.wakeup.at(begun + 20 * MS)
    woken.wakeup.at(begun + 90_000 * MS)
    assert await woken.wait() - begun >= 19 * MS
    woken.wakeup.cancel()


async def test_less_than_a_millisecond_is_no_timer_which_would_be_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay_s, call: timers.append(delay_s))
    woken = Woken(perf_counter_ns() + MS // 5)
    woken.wakeup.at(woken.due_ns)
    while not woken.times or woken.times[-1] < woken.due_ns:
        await asyncio.sleep(0)
    assert timers == []


async def test_soon_is_once_in_the_next_turn() -> None:
    woken = Woken()
    woken.wakeup.soon()
    woken.wakeup.soon()
    assert woken.times == []
    await turns()
    assert len(woken.times) == 1


async def test_cancelled_it_stays_silent() -> None:
    woken = Woken()
    woken.wakeup.soon()
    woken.wakeup.at(perf_counter_ns() + MS)
    woken.wakeup.cancel()
    woken.wakeup.at(perf_counter_ns() + 2 * MS)
    woken.wakeup.cancel()
    await turns(5)
    assert woken.times == []
