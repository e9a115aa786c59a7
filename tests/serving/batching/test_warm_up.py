import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.instance import Instance, Placement
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse, SequenceFlag
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import AtOnceInstance, HeldInstance, model_of, request, turns
from tests.waiting import until

SEQUENCE = """sequence_batching {
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
    state { input_name: "IN_STATE" output_name: "OUT_STATE" data_type: TYPE_FP32 dims: [ 3 ] }
}"""


class Seen(AtOnceInstance):
    """Keeps what it ran."""

    def __init__(self) -> None:
        self.jobs: list[InferJob] = []

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self.jobs += jobs
        super().execute(jobs, done)


async def test_every_instance_runs_it_and_nobody_counts_it() -> None:
    instances = [HeldInstance(), HeldInstance()]
    passive = HeldInstance("p", Placement("p", is_passive=True))
    model = model_of(
        "dynamic_batching { preserve_ordering: true } response_cache { enable: true }", *instances, passive
    )
    warming = asyncio.create_task(model.warm_up(request("w", rows=8)))
    await until(lambda: all(each.is_running for each in instances))
    for each in instances:
        each.finish()
    await warming
    assert passive.batches == []
    statistics = model.statistics
    assert statistics.inference_count == statistics.execution_count == 0
    assert statistics.infer.success.count == statistics.infer.fail.count == 0
    assert statistics.batches == {}
    assert model.num_in_flight == 0
    await model.close()


async def test_places_with_one_worker_run_it_once() -> None:
    shared = Placement("i")
    places = [HeldInstance("i", shared) for _ in range(3)]
    model = model_of("", *places)
    warming = asyncio.create_task(model.warm_up(request("w")))
    await until(lambda: places[0].is_running)
    assert not places[1].is_running and not places[2].is_running
    places[0].finish()
    await warming


async def test_what_an_instance_says_is_raised_when_all_have_ended() -> None:
    class Failing(AtOnceInstance):
        def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
            jobs[0].fail(SluiceError(ErrorCode.INTERNAL, "no"))
            done()

    held = HeldInstance()
    model = model_of("", Failing(), held)
    warming = asyncio.create_task(model.warm_up(request("w")))
    await turns()
    assert not warming.done()
    held.finish()
    with pytest.raises(SluiceError, match="no"):
        await warming


async def test_an_instance_that_has_answered_is_waited_for_until_it_is_free() -> None:
    held = HeldInstance()
    warming = asyncio.create_task(model_of("", held).warm_up(request("w")))
    await until(lambda: held.is_running)
    held.answer()
    await turns(20)
    assert not warming.done()
    held.finish()
    await warming


async def test_who_gives_up_waiting_cancels_it() -> None:
    held = HeldInstance()
    model = model_of("", held)
    warming = asyncio.create_task(model.warm_up(request("w")))
    await until(lambda: held.is_running)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    assert held.batches[0][0].is_cancelled


async def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SluiceError, match="batch-size must be <= 8"):
        await model_of("", HeldInstance()).warm_up(request("w", rows=9))


async def test_a_stream_is_waited_for_to_its_end() -> None:
    held = HeldInstance()
    model = model_of("model_transaction_policy { decoupled: true }", held)
    warming = asyncio.create_task(model.warm_up(request("w")))
    await until(lambda: held.is_running)
    held.batches[0][0].respond(InferResponse([Tensor.of("Y", np.zeros((1, 1), np.int32))], is_final=False))
    await turns()
    assert not warming.done()
    held.finish()
    await warming
    assert model.statistics.responses == {}


async def test_rows_come_as_clients_send_them() -> None:
    seen = Seen()
    asked = request("w", rows=3)
    asked.inputs["X"] = Tensor.of("X", np.arange(6, dtype=np.int32).reshape(3, 2))
    await model_of("", seen).warm_up(asked)
    assert [job.request.inputs["X"].array.tolist() for job in seen.jobs] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert [job.executed_batch_size for job in seen.jobs] == [3, 3, 3]


async def test_a_sequence_model_gets_a_whole_sequence_in_each_row() -> None:
    instances: list[Instance] = [Seen(), Seen()]
    model = model_of(SEQUENCE, *instances)
    await model.warm_up(request("w", rows=2))
    for each in instances:
        assert isinstance(each, Seen)
        assert len(each.jobs) == 2
        for number, job in enumerate(each.jobs, start=1):
            assert job.request.sequence == SequenceFlag.START | SequenceFlag.END
            inputs = {name: tensor.array.tolist() for name, tensor in job.request.inputs.items() if name != "X"}
            assert inputs == {"START": [[1]], "READY": [[1.0]], "ID": [[number]], "IN_STATE": [[0.0] * 3]}
    await model.close()


async def test_control_inputs_that_are_given_stay() -> None:
    seen = Seen()
    model = model_of(SEQUENCE, seen)
    asked = request("w")
    asked.inputs["READY"] = Tensor.of("READY", np.full((1, 1), 7, np.float32))
    await model.warm_up(asked)
    assert seen.jobs[0].request.inputs["READY"].array.tolist() == [[7.0]]
    await model.close()
