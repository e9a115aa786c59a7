"""The lane on its own, before a sender that answers when the test says so."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.serving.caching.redis_commands import Availability, CommandBatcher
from sluice.serving.statistics import CacheUsage
from tests.serving.batching.parts import turns
from tests.waiting import PATIENCE_S, until


class Sender:
    """Answers each number with its double, batch by batch, as often as it is let."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: Exception | None = None
        self.let = asyncio.Semaphore(0)

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        await self.let.acquire()
        if self.error is not None:
            raise self.error
        return [2 * item for item in items]


async def _pong() -> object:
    return None


@pytest.fixture
async def availability() -> AsyncIterator[Availability]:
    made = Availability(_pong, "here", CacheUsage(None), retry_s=60)
    await until(lambda: made.is_up)
    yield made
    await made.close()


def lane_of(
    sender: Sender, availability: Availability, *, width: int = 1, max_wait_s: float = 60
) -> CommandBatcher[int, int]:
    return CommandBatcher(sender, -1, availability, max_wait_s=max_wait_s, width=width)


async def test_what_comes_meanwhile_goes_together_next(availability: Availability) -> None:
    sender = Sender()
    lane = lane_of(sender, availability)
    first = [lane.put(number) for number in (1, 2)]
    await turns()
    then = [lane.put(number) for number in (3, 4, 5)]
    sender.let.release()
    sender.let.release()
    assert await asyncio.gather(*first, *then) == [2, 4, 6, 8, 10]
    assert sender.batches == [[1, 2], [3, 4, 5]]


async def test_width_is_how_many_are_under_way(availability: Availability) -> None:
    sender = Sender()
    lane = lane_of(sender, availability, width=2)
    answers = []
    for number in range(4):
        answers.append(lane.put(number))
        await turns()
    assert sender.batches == [[0], [1]]
    for _ in range(3):
        sender.let.release()
    assert await asyncio.gather(*answers) == [0, 2, 4, 6]
    assert sender.batches[2] == [2, 3]


async def test_a_batch_has_a_largest_size(availability: Availability) -> None:
    sender = Sender()
    lane = lane_of(sender, availability)
    answers = [lane.put(number) for number in range(150)]
    for _ in range(5):
        sender.let.release()
    assert await asyncio.gather(*answers) == [2 * number for number in range(150)]
    assert [len(batch) for batch in sender.batches] == [32, 32, 32, 32, 22]


async def test_an_answer_may_ask_again_at_once(availability: Availability) -> None:
    sender = Sender()
    lane = lane_of(sender, availability)
    again: list[asyncio.Future[int]] = []
    lane.put(1).add_done_callback(lambda _: again.append(lane.put(2)))
    sender.let.release()
    sender.let.release()
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: bool(again))
        assert await again[0] == 4


async def test_who_has_waited_too_long_gets_nothing(availability: Availability) -> None:
    sender = Sender()
    lane = lane_of(sender, availability, max_wait_s=0)
    assert await lane.put(1) == -1
    assert sender.batches == []


async def test_failures_answer_with_nothing_until_it_is_down(availability: Availability) -> None:
    sender = Sender()
    sender.error = RedisConnectionError("gone")
    lane = lane_of(sender, availability)
    for _ in range(3):
        assert availability.is_up
        sender.let.release()
        assert await lane.put(1) == -1
    assert not availability.is_up
    assert lane.put(1).done()
    assert len(sender.batches) == 3


async def test_a_success_forgives(availability: Availability) -> None:
    sender = Sender()
    lane = lane_of(sender, availability)
    for error in (OSError(), TimeoutError(), None, OSError(), OSError()):
        sender.error = error
        sender.let.release()
        await lane.put(1)
    assert availability.is_up


async def test_going_down_answers_all_that_wait(availability: Availability) -> None:
    sender = Sender()
    sender.error = OSError()
    lane = lane_of(sender, availability)
    answers = [lane.put(number) for number in range(32 * 10)]
    for _ in range(3):
        sender.let.release()
    assert set(await asyncio.gather(*answers)) == {-1}
    assert len(sender.batches) == 3
