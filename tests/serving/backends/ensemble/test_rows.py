"""Batches for a step that takes one row at a time."""

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.request import InferResponse
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import (
    Caller,
    FunctionModel,
    HeldModel,
    ensemble_config,
    floats,
    load,
    request,
    simple_config,
)


def batch(*rows: float) -> dict[str, Array]:
    return {"a": np.array(rows, np.float32)[:, np.newaxis]}


async def over(model: HeldModel) -> EnsembleModel:
    """Load an ensemble of a step that batches, `model`, and another step that batches."""
    first = FunctionModel(simple_config("first", dims="1", max_batch_size=4), lambda X: {"Y": X + 1})
    last = FunctionModel(simple_config("last", dims="1", max_batch_size=4), lambda X: {"Y": X * 10})
    steps = f"first: X=a -> Y=s; {model.name}: X=s -> Y=t; last: X=t -> Y=z"
    config = ensemble_config(steps, outputs="zt", extra="max_batch_size: 4", dims="1")
    return await load(config, Lookup(first, model, last))


async def test_the_rows_run_side_by_side_and_come_back_in_order() -> None:
    single = HeldModel(simple_config("single", dims="1"))
    caller = Caller(await over(single), request(batch(1, 2, 3)))
    assert [job.request.inputs["X"].array.tolist() for job in single.jobs] == [[2.0], [3.0], [4.0]]
    for row in (2, 0, 1):
        assert not caller.responses
        single.answer(row, Y=floats(row))
    outputs = {each.name: each.array.tolist() for each in caller.only.outputs}
    assert outputs == {"t": [[0.0], [1.0], [2.0]], "z": [[0.0], [10.0], [20.0]]}


async def test_the_first_error_ends_all_rows() -> None:
    single = HeldModel(simple_config("single", dims="1"))
    model = await over(single)
    caller = Caller(model, request(batch(1, 2, 3)))
    single.answer(0, Y=floats(5))
    single.jobs[1].fail(SluiceError(ErrorCode.INTERNAL, "boom"))
    assert caller.error.message == "in ensemble 'whole', boom"
    assert (single.num_cancelled, single.num_in_flight, model.num_in_flight) == (1, 0, 0)


async def test_a_row_that_is_refused_ends_those_before_it() -> None:
    class Picky(HeldModel):
        def _start(self, job: object) -> None:
            if len(self.jobs) == 2:
                raise SluiceError(ErrorCode.OVERLOADED, "full")
            super()._start(job)  # type: ignore[arg-type]

    single = Picky(simple_config("single", dims="1"))
    model = await over(single)
    caller = Caller(model, request(batch(1, 2, 3)))
    assert caller.error.message == "in ensemble 'whole', model 'single': full"
    assert (single.num_cancelled, single.num_in_flight, model.num_in_flight) == (2, 0, 0)


async def test_cancelling_reaches_every_row() -> None:
    single = HeldModel(simple_config("single", dims="1"))
    caller = Caller(await over(single), request(batch(1, 2)))
    caller.job.cancel()
    assert (single.num_cancelled, single.num_in_flight) == (2, 0)


async def test_rows_of_different_shapes_make_no_batch() -> None:
    single = HeldModel(simple_config("single"))
    config = ensemble_config("single: X=a -> Y=z", extra="max_batch_size: 4")
    caller = Caller(await load(config, Lookup(single)), request({"a": np.ones((2, 3), np.float32)}))
    single.answer(0, Y=floats(1))
    single.jobs[1].respond(InferResponse([Tensor.of("Y", floats(1, 2))]))
    assert "model 'single' answered the rows of a batch with tensors of different shapes" in caller.error.message


async def test_several_rows_do_not_stream() -> None:
    single = HeldModel(simple_config("single", dims="1", is_decoupled=True))
    caller = Caller(await over(single), request(batch(1, 2)))
    assert (caller.error.code, caller.error.param) == (ErrorCode.INVALID, "stream")
    assert "only a request of one row can stream, this one has 2" in caller.error.message
    assert not single.jobs


@pytest.mark.parametrize("num_rows", [1, 3])
async def test_strings(num_rows: int) -> None:
    single = FunctionModel(
        simple_config("single", dims="1", data_type="TYPE_STRING"), lambda X: {"Y": np.array([X[0].upper()], object)}
    )
    config = ensemble_config("single: X=a -> Y=z", extra="max_batch_size: 4", dims="1")
    config.input[0].data_type = config.output[0].data_type = 13
    words = [[b"a"], [b"b"], [b"c"]][:num_rows]
    caller = Caller(await load(config, Lookup(single)), request({"a": np.array(words, object)}))
    assert caller.only.outputs[0].array.tolist() == [[word.upper()] for [word] in words]
