"""Requests that are tasks: however those end, so do the requests. All of their responses are pushed to a consumer, in
order."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

import sluice.serving.model as model_module
from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob
from sluice.serving.model import Model, ResponseStream
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.task_model import RequestTasks, count_queued, gather_all
from tests.waiting import PATIENCE_S, until

CONFIG = text_format.Parse('name: "m" backend: "test"', ModelConfig())
Work = Callable[[], Coroutine[Any, Any, None]]


class TasksModel(Model):
    """Each request is the work that was given for it."""

    def __init__(self) -> None:
        super().__init__(CONFIG, build_spec(CONFIG, 1))
        self.tasks = RequestTasks(self.spec)
        self.work: Work = for_ever

    def _start(self, job: InferJob) -> None:
        self.tasks.start(job, self.work)

    async def close(self) -> None:
        await self.tasks.cancel_all()


def submitted(model: TasksModel, work: Work) -> tuple[InferJob, list[InferResponse]]:
    responses: list[InferResponse] = []
    model.work = work
    return model.submit(InferRequest(inputs={}), responses.append), responses


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_closing_ends_every_request_even_one_that_has_not_begun() -> None:
    model = TasksModel()
    _, begun = submitted(model, for_ever)
    await asyncio.sleep(0)
    _, new = submitted(model, for_ever)
    assert count_queued(model.tasks.jobs) == 2
    await model.close()
    assert [response.error.code for [response] in (begun, new) if response.error] == [ErrorCode.CANCELLED] * 2
    assert not model.tasks.jobs


async def test_who_cancels_ends_the_work() -> None:
    model, ended = TasksModel(), asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    job, responses = submitted(model, work)
    await asyncio.sleep(0)
    job.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
        await model.wait_idle()
    assert responses == []


async def test_one_may_be_answered_for_it() -> None:
    model = TasksModel()
    job, responses = submitted(model, for_ever)
    job.fail(SluiceError(ErrorCode.UNAVAILABLE, "gone"))
    model.tasks.cancel(job)
    await model.close()
    assert [str(response.error) for response in responses] == ["gone"]


async def test_a_fault_of_ours_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("secret")

    model = TasksModel()
    with caplog.at_level(logging.ERROR):
        _, responses = submitted(model, work)
        await model.wait_idle()
    [response] = responses
    assert response.error is not None and response.error.code is ErrorCode.INTERNAL
    assert "secret" not in response.error.message
    assert "secret" in caplog.text


async def test_the_first_failure_ends_what_runs_beside_it() -> None:
    ended = asyncio.Event()

    async def other() -> int:
        try:
            await for_ever()
        finally:
            ended.set()
        return 1

    async def failing() -> int:
        await asyncio.sleep(0)
        raise SluiceError(ErrorCode.INVALID, "no")

    with pytest.raises(SluiceError, match="no"):
        await gather_all([other(), failing()])
    assert ended.is_set()


async def test_results_stand_in_order() -> None:
    async def result(number: int, num_turns: int) -> int:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return number

    assert await gather_all([result(1, 3), result(2, 0)]) == [1, 2]
    assert await gather_all([result(3, 1)]) == [3]


class Reader:
    """Notes what it takes, and stops at the numbers that are given until it may go on."""

    def __init__(self, stops_at: Sequence[int] = (), fails_at: int = -1) -> None:
        self.numbers: list[int] = []
        self.may_go_on = asyncio.Event()
        self._stops_at = stops_at
        self._fails_at = fails_at

    def take(self, response: InferResponse) -> bool:
        number = response.parameters["number"]
        assert isinstance(number, int)
        if number == self._fails_at:
            raise SluiceError(ErrorCode.INTERNAL, "not this one")
        self.numbers.append(number)
        return number not in self._stops_at

    async def ready(self) -> None:
        await self.may_go_on.wait()


def pushed(reader: Reader) -> tuple[InferJob, "asyncio.Task[None]"]:
    model = TasksModel()
    task = asyncio.ensure_future(ResponseStream(model, InferRequest({})).pass_to(reader))
    [job] = model.tasks.jobs
    return job, task


def send(job: InferJob, *numbers: int, is_final: bool = False) -> None:
    for number in numbers:
        job.respond(InferResponse(parameters={"number": number}, is_final=is_final and number == numbers[-1]))


async def test_what_comes_while_the_consumer_is_not_ready_comes_after_that() -> None:
    reader = Reader(stops_at=(1, 4))
    job, task = pushed(reader)
    send(job, 0, 1, 2)
    await until(lambda: reader.numbers)
    assert reader.numbers == [0, 1]
    send(job, 3)
    reader.may_go_on.set()
    send(job, 4, 5, is_final=True)
    await task
    assert reader.numbers == [0, 1, 2, 3, 4, 5]
    assert not job.is_cancelled


async def test_a_consumer_that_falls_behind_gets_what_came_before_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "MAX_UNREAD", 3)
    reader = Reader(stops_at=(0,))
    job, task = pushed(reader)
    send(job, *range(10))
    assert job.is_cancelled
    reader.may_go_on.set()
    with pytest.raises(SluiceError, match="the client fell 3 responses behind"):
        await task
    assert reader.numbers == [0, 1, 2, 3]


async def test_a_consumers_failure_and_a_cancellation_cancel_the_request() -> None:
    reader = Reader(fails_at=1)
    job, task = pushed(reader)
    send(job, 0, 1, 2)
    with pytest.raises(SluiceError, match="not this one"):
        await task
    assert (reader.numbers, job.is_cancelled) == ([0], True)
    reader = Reader()
    job, task = pushed(reader)
    send(job, 0)
    await until(lambda: reader.numbers)
    task.cancel()
    await asyncio.wait((task,))
    assert job.is_cancelled
