"""The lane on its own, before a sender that answers when the test says so."""

import asyncio
import importlib
import sys

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.errors import SluiceError
from sluice.state.outage import Outage
from sluice.state.redis import CommandBatcher
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


@pytest.fixture
def outage() -> Outage:
    made = Outage("Redis is away", "Redis answers again", tolerance=3)
    made.end()
    return made


def lane_of(sender: Sender, outage: Outage, *, width: int = 1, max_wait_s: float = 60) -> CommandBatcher[int, int]:
    return CommandBatcher(sender, -1, outage, max_wait_s=max_wait_s, width=width)


async def test_what_comes_meanwhile_goes_together_next(outage: Outage) -> None:
    sender = Sender()
    lane = lane_of(sender, outage)
    first = [lane.put(number) for number in (1, 2)]
    await turns()
    then = [lane.put(number) for number in (3, 4, 5)]
    sender.let.release()
    sender.let.release()
    assert await asyncio.gather(*first, *then) == [2, 4, 6, 8, 10]
    assert sender.batches == [[1, 2], [3, 4, 5]]


async def test_width_is_how_many_are_under_way(outage: Outage) -> None:
    sender = Sender()
    lane = lane_of(sender, outage, width=2)
    answers = []
    for number in range(4):
        answers.append(lane.put(number))
        await turns()
    assert sender.batches == [[0], [1]]
    for _ in range(3):
        sender.let.release()
    assert await asyncio.gather(*answers) == [0, 2, 4, 6]
    assert sender.batches[2] == [2, 3]


async def test_a_batch_has_a_largest_size(outage: Outage) -> None:
    sender = Sender()
    lane = lane_of(sender, outage)
    answers = [lane.put(number) for number in range(150)]
    for _ in range(5):
        sender.let.release()
    assert await asyncio.gather(*answers) == [2 * number for number in range(150)]
    assert [len(batch) for batch in sender.batches] == [32, 32, 32, 32, 22]


async def test_an_answer_may_ask_again_at_once(outage: Outage) -> None:
    sender = Sender()
    lane = lane_of(sender, outage)
    again: list[asyncio.Future[int]] = []
    lane.put(1).add_done_callback(lambda _: again.append(lane.put(2)))
    sender.let.release()
    sender.let.release()
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: bool(again))
        assert await again[0] == 4


async def test_who_has_waited_too_long_gets_nothing(outage: Outage) -> None:
    sender = Sender()
    lane = lane_of(sender, outage, max_wait_s=0)
    assert await lane.put(1) == -1
    assert sender.batches == []


async def test_failures_answer_with_nothing_until_it_is_down(outage: Outage) -> None:
    sender = Sender()
    sender.error = RedisConnectionError("gone")
    lane = lane_of(sender, outage)
    for _ in range(3):
        assert outage.is_up
        sender.let.release()
        assert await lane.put(1) == -1
    assert not outage.is_up
    assert lane.put(1).done()
    assert len(sender.batches) == 3


async def test_a_success_forgives(outage: Outage) -> None:
    sender = Sender()
    lane = lane_of(sender, outage)
    for error in (OSError(), TimeoutError(), None, OSError(), OSError()):
        sender.error = error
        sender.let.release()
        await lane.put(1)
    assert outage.is_up


async def test_going_down_answers_all_that_wait(outage: Outage) -> None:
    sender = Sender()
    sender.error = OSError()
    lane = lane_of(sender, outage)
    answers = [lane.put(number) for number in range(32 * 10)]
    for _ in range(3):
        sender.let.release()
    assert set(await asyncio.gather(*answers)) == {-1}
    assert len(sender.batches) == 3


def test_a_missing_client_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "redis"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "sluice.state.redis")
    with pytest.raises(SluiceError, match=r"pip install 'sluice\[redis\]'"):
        importlib.import_module("sluice.state.redis")
