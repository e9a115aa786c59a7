"""Loads, unloads and requests at the same time, and loads that hang."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.repository.candidate import ModelReading, read_model
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from tests.serving.repository.parts import (
    READY,
    UNLOADED,
    Bench,
    StampModel,
    ask,
    failure,
    rows,
    write_model,
    write_version,
)
from tests.waiting import PATIENCE_S, until


async def test_requests_under_way_end_in_the_model_that_they_began_in(repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "a", 1)
    await repository.load("a")
    old = repository.find("a")
    assert isinstance(old, StampModel)
    old.gate.clear()
    answer = asyncio.ensure_future(ask(repository, "a"))
    await until(lambda: old.num_in_flight == 1)
    write_version(folder, 1, 22)
    await repository.load("a")
    assert await ask(repository, "a") == 22
    assert not old.is_closed
    old.gate.set()
    assert await answer == 1
    await until(lambda: old.is_closed)
    assert rows(repository) == {("a", 1): READY}


async def test_unloading_takes_as_long_as_the_requests_under_way(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1)
    await repository.load("a")
    model = repository.find("a")
    assert isinstance(model, StampModel)
    model.gate.clear()
    answer = asyncio.ensure_future(ask(repository, "a"))
    await until(lambda: model.num_in_flight == 1)
    await repository.unload("a")
    assert rows(repository)["a", 1][0] is ModelState.UNLOADING
    with pytest.raises(SluiceError, match="has no available versions"):
        repository.find("a")
    model.gate.set()
    assert await answer == 1
    await until(lambda: model.is_closed and rows(repository)["a", 1] == UNLOADED)
    assert repository.is_ready


async def test_concurrent_loads_and_unloads_follow_one_another(
    bench: Bench, repository: ModelRepository, root: Path
) -> None:
    folder = write_model(root, "a", 1)
    for round_ in range(20):
        write_version(folder, 1, round_)
        await asyncio.gather(repository.load("a"), repository.load("a"), repository.unload("a"), repository.load("a"))
        assert await ask(repository, "a") == round_
    assert bench.stamp.most_loading == 1


async def test_what_was_read_first_is_not_applied_last(
    repository: ModelRepository, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(root, "a", 1)
    goes_on, readings = threading.Event(), []

    def read_slowly_once(*args: Any, **options: Any) -> ModelReading:
        reading = read_model(*args, **options)
        readings.append(reading)
        if len(readings) == 1:
            goes_on.wait(PATIENCE_S)
        return reading

    monkeypatch.setattr("sluice.serving.repository.updates.read_model", read_slowly_once)
    first = asyncio.ensure_future(repository.load("a"))
    await until(lambda: len(readings) == 1)
    write_version(folder, 2, 2)
    second = asyncio.ensure_future(repository.load("a"))
    await asyncio.wait([second], timeout=0.1)
    goes_on.set()
    await asyncio.gather(first, second)
    assert await ask(repository, "a") == 2


async def test_a_load_that_hangs_is_given_up(bench: Bench, root: Path) -> None:
    write_model(root, "a", "hang")
    write_model(root, "b", 2)
    repository = bench.repository(load_timeout_s=0.05)
    await repository.start()
    error = await failure(repository.load("a"))
    assert "Internal: loading took longer than 0.05 s" in error.message
    await repository.load("b")
    assert await ask(repository, "b") == 2
    await repository.close()


async def test_a_load_goes_on_when_its_caller_has_left(bench: Bench, repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", "hang")
    caller = asyncio.ensure_future(repository.load("a"))
    await bench.stamp.is_hanging.wait()
    assert "model 'a' version 1 is LOADING" in repository.problem
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    bench.stamp.release.set()
    await until(lambda: rows(repository).get(("a", 1)) == READY)


async def test_closing_ends_a_load_that_hangs(bench: Bench, root: Path) -> None:
    write_model(root, "a", "hang")
    repository = bench.repository()
    await repository.start()
    caller = asyncio.ensure_future(repository.load("a"))
    await bench.stamp.is_hanging.wait()
    await repository.close(0.01)
    assert isinstance((await asyncio.gather(caller, return_exceptions=True))[0], asyncio.CancelledError)
    assert (await failure(repository.load("a"))).code is ErrorCode.UNAVAILABLE


async def test_closing_ends_requests_that_take_too_long(bench: Bench, root: Path) -> None:
    write_model(root, "a", 1)
    write_model(root, "b", 1)
    repository = bench.repository(ControlMode.NONE)
    await repository.start()
    for name in ("a", "b"):
        model = repository.find(name)
        assert isinstance(model, StampModel)
        model.gate.clear()
    answers = [asyncio.ensure_future(ask(repository, name)) for name in ("a", "b")]
    await until(lambda: all(model.num_in_flight for model in repository.models()))
    quick = repository.find("a")
    assert isinstance(quick, StampModel)
    closing = asyncio.ensure_future(repository.close(0.2))
    await until(lambda: not repository.models())
    quick.gate.set()
    assert await answers[0] == 1
    await closing
    assert (await failure(answers[1])).code is ErrorCode.UNAVAILABLE
    assert not bench.stamp.open_models
