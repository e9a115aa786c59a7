"""Requests that are tasks: however those end, so do the requests."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.task_model import RequestTasks, count_queued, gather_all
from tests.waiting import PATIENCE_S

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
