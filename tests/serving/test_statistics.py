from dataclasses import fields
from pathlib import Path
from time import time

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python.backend import PythonModel
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.statistics import FailureReason, InferStatistics, ModelStatistics
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import (
    AtOnceInstance,
    Client,
    HeldInstance,
    config_of,
    model_of,
    request,
    turns,
)

DECOUPLED = "model_transaction_policy { decoupled: true }"


def counts(infer: InferStatistics) -> dict[str, int]:
    return {each.name: count for each in fields(infer) if (count := getattr(infer, each.name).count)}


async def test_a_success_moves_everything() -> None:
    instance = HeldInstance()
    client = Client(
        model_of("dynamic_batching { preferred_batch_size: 5 max_queue_delay_microseconds: 1000000 }", instance)
    )
    statistics = client.model.statistics
    client.submit("a", rows=2)
    client.submit("b", rows=3)
    await turns()
    (batch,) = instance.batches
    for job in batch:
        job.started_ns = job.compute_started_ns - 1000
        job.infer_started_ns = job.compute_started_ns + 10
        job.infer_ended_ns = job.compute_started_ns + 30
    before = time() * 1000
    instance.finish()
    assert counts(statistics.infer) == {
        "success": 2,
        "queue": 2,
        "compute_input": 2,
        "compute_infer": 2,
        "compute_output": 2,
    }
    infer = statistics.infer
    assert (infer.queue.ns, infer.compute_input.ns, infer.compute_infer.ns) == (2000, 20, 40)
    parts = (infer.queue, infer.compute_input, infer.compute_infer, infer.compute_output)
    assert infer.success.ns == sum(part.ns for part in parts)
    assert (statistics.inference_count, statistics.execution_count) == (5, 1)
    assert list(statistics.batches) == [5]
    assert statistics.batches[5].compute_infer.count == 1
    assert statistics.batches[5].compute_infer.ns == 20
    assert before - 1 <= statistics.last_inference_ms <= time() * 1000
    assert statistics.responses == {}


async def test_a_failure_moves_only_its_own_count_and_the_executions() -> None:
    instance = HeldInstance()
    client = Client(model_of("", instance))
    job = client.submit("a")
    job.fail(SluiceError(ErrorCode.INTERNAL, "broken"))
    instance.finish()
    statistics = client.model.statistics
    assert counts(statistics.infer) == {"fail": 1}
    assert statistics.failures[FailureReason.BACKEND] == 1
    assert (statistics.inference_count, statistics.execution_count) == (0, 1)


async def test_what_does_not_fit_the_model_is_not_counted() -> None:
    client = Client(model_of("", HeldInstance()))
    with pytest.raises(SluiceError):
        client.submit("a", rows=9)
    assert counts(client.model.statistics.infer) == {}


async def test_cancelled_requests_have_a_reason_of_their_own() -> None:
    instance = HeldInstance()
    client = Client(model_of("", instance))
    client.submit("a").cancel()
    instance.finish()
    assert client.model.statistics.failures[FailureReason.CANCELED] == 1
    assert counts(client.model.statistics.infer) == {"fail": 1}


class Direct(Model):
    """Answers without a scheduler, as ensembles and LLMs do."""

    error: SluiceError | None = None

    def _start(self, job: InferJob) -> None:
        job.respond(InferResponse([] if self.error else [job.request.inputs["X"]], error=self.error))

    async def close(self) -> None:
        pass


async def test_a_request_that_no_scheduler_ran_is_an_execution_of_its_own() -> None:
    model = Direct(config_of(), build_spec(config_of(), 1))
    model.submit(request("a", rows=3), lambda response: None)
    statistics = model.statistics
    assert (statistics.inference_count, statistics.execution_count, list(statistics.batches)) == (3, 1, [3])
    assert statistics.infer.compute_infer.ns == statistics.infer.success.ns > 0
    for code, reason in (
        (ErrorCode.INTERNAL, FailureReason.OTHER),
        (ErrorCode.OVERLOADED, FailureReason.REJECTED),
        (ErrorCode.CANCELLED, FailureReason.CANCELED),  # with an earlier request of its sequence
    ):
        model.error = SluiceError(code, "no")
        model.submit(request("b"), lambda response: None)
        assert statistics.failures[reason] == 1
    assert (statistics.inference_count, statistics.execution_count) == (3, 1)


async def test_streams_are_counted_by_the_place_of_their_responses() -> None:
    instance = HeldInstance()
    client = Client(model_of(DECOUPLED, instance))
    piece = Tensor.of("Y", np.zeros((1, 1), np.int32))
    job = client.submit("a")
    job.respond(InferResponse([piece], is_final=False))
    job.respond(InferResponse(error=SluiceError(ErrorCode.INTERNAL, "no"), is_final=False))
    job.respond(InferResponse([], is_final=True))
    found = client.model.statistics.responses
    assert {
        place: [name for name in ("success", "fail", "empty_response") if getattr(each, name).count]
        for place, each in found.items()
    } == {
        0: ["success"],
        1: ["fail"],
        2: ["empty_response"],
    }
    assert found[0].compute_infer.count == found[0].compute_output.count == 1
    assert found[1].compute_output.count == 0
    instance.finish()
    job = client.submit("b")
    job.respond(InferResponse([piece], is_final=False))
    job.cancel()
    instance.finish()
    assert found[1].cancel.count == 1


class QuietModel(ScheduledModel):
    _counts_responses = False


async def test_a_kind_of_model_may_have_no_statistics_of_responses() -> None:
    """As Triton's Python backend."""
    assert not PythonModel._counts_responses
    client = Client(QuietModel(ModelSource(Path("/models/echo"), 1, config_of(DECOUPLED)), [AtOnceInstance()]))
    client.submit("a")
    assert client.answered == ["a"]
    assert client.model.statistics.responses == {}


def test_keeping_an_answer_is_part_of_the_request() -> None:
    statistics = ModelStatistics()
    statistics.record_cache_miss(500)
    assert (statistics.infer.cache_miss.count, statistics.infer.cache_miss.ns) == (1, 500)
    assert (statistics.infer.success.count, statistics.infer.success.ns) == (0, 500)
