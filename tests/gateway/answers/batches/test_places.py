"""Who gets a place, who loses it, and what a failure does to those that wait."""

import asyncio

import pytest

from sluice.gateway.answers.batches import places
from sluice.gateway.answers.batches.places import Capacity, Place, PlaceKeeper

_TURNS = 500
"""Turns of the event loop after which nobody gets a place any more."""


class Engine:
    """An engine's capacity, as a test sets it."""

    def __init__(self, **capacity: int) -> None:
        self.capacity = Capacity(8, 2, **capacity)  # type: ignore[arg-type]

    def measure(self, model: str, num_taken: int) -> Capacity:
        return self.capacity


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(places, "POLL_S", 0.0)
    return Engine()


async def take_all(keeper: PlaceKeeper, num_waiting: int) -> list[Place]:
    """Return the places that so many requests get; the others go on waiting."""
    tasks = [asyncio.create_task(keeper.take("m")) for _ in range(num_waiting)]
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    taken = [task.result() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return taken


async def test_others_leave_few_places_for_a_while(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = PlaceKeeper(engine.measure)
    alone = await take_all(keeper, 20)
    assert len(alone) == keeper.num_taken == 8
    for place in alone[2:]:
        place.release()
        place.release()
    engine.capacity = engine.capacity._replace(has_others=True)
    assert await take_all(keeper, 20) == []
    engine.capacity = engine.capacity._replace(has_others=False)
    assert await take_all(keeper, 20) == []
    monkeypatch.setattr(places, "_QUIET_S", 0.0)
    assert len(await take_all(keeper, 20)) == 6


async def test_the_youngest_yield_once_for_each_report(engine: Engine) -> None:
    keeper = PlaceKeeper(engine.measure)
    taken = await take_all(keeper, 8)
    revoked: list[Place] = []
    for place in taken:
        place.on_revoke = lambda place=place: revoked.append(place)  # type: ignore[misc]
    engine.capacity = engine.capacity._replace(num_waiting=3, step=10)
    assert await take_all(keeper, 1) == [] and revoked == taken[5:] and keeper.num_taken == 5
    engine.capacity = engine.capacity._replace(num_waiting=1, step=12)
    await take_all(keeper, 1)
    assert revoked == [*taken[5:], taken[4]] and keeper.num_revoked == 4


async def test_a_failure_reaches_those_that_wait() -> None:
    def fail(model: str, num_taken: int) -> Capacity:
        raise RuntimeError("broken")

    keeper = PlaceKeeper(fail)
    for _ in range(2):  # and the next one is not left waiting either
        with pytest.raises(RuntimeError, match="broken"):
            await keeper.take("m")
