"""Decoupled steps: their responses go on one by one, in order."""

from collections.abc import Iterable
from contextlib import aclosing
from random import Random

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from tests.serving.backends.builders import Lookup, infer_stream
from tests.serving.backends.ensemble.parts import (
    Caller,
    HeldModel,
    ensemble_config,
    floats,
    load,
    request,
    simple_config,
)


def streaming(name: str) -> HeldModel:
    return HeldModel(simple_config(name, is_decoupled=True))


async def chain(*models: HeldModel) -> EnsembleModel:
    names = ["a", *(f"t{index}" for index in range(len(models) - 1)), "z"]
    steps = ";".join(f"{model.name}: X={names[index]} -> Y={names[index + 1]}" for index, model in enumerate(models))
    return await load(ensemble_config(steps), Lookup(*models))


async def test_an_ensemble_with_a_decoupled_step_is_decoupled() -> None:
    model = await chain(streaming("first"), HeldModel(simple_config("second")))
    assert model.spec.is_decoupled
    assert model.config.model_transaction_policy.decoupled
    plain = await chain(HeldModel(simple_config("only")))
    assert not plain.spec.is_decoupled


async def test_an_error_while_the_step_is_being_asked_ends_it() -> None:
    class Failing(HeldModel):
        def _start(self, job: InferJob) -> None:
            super()._start(job)
            job.respond(InferResponse(error=SluiceError(ErrorCode.INTERNAL, "at once"), is_final=False))

    first = Failing(simple_config("first", is_decoupled=True))
    caller = Caller(await chain(first), request())
    assert caller.error.message == "in ensemble 'whole', at once"
    assert (first.num_cancelled, first.num_in_flight) == (1, 0)


async def test_a_reader_that_leaves_cancels_the_steps() -> None:
    first = Burst(simple_config("first", is_decoupled=True), [1.0, 2.0], ends=False)
    async with aclosing(infer_stream(await chain(first), request())) as stream:
        response = await anext(stream)
        assert response.outputs[0].array.tolist() == [1.0]
    assert first.num_cancelled == 1


class Burst(HeldModel):
    """Gives all its responses at once."""

    def __init__(self, config: ModelConfig, values: Iterable[float], *, ends: bool = True) -> None:
        super().__init__(config)
        self.values, self.ends = values, ends

    def _start(self, job: InferJob) -> None:
        super()._start(job)
        for each in self.values:
            self.answer(-1, is_final=False, Y=floats(each))
        if self.ends:
            self.end(-1)


async def test_thousands_of_responses_at_once_come_in_order() -> None:
    count = 3_000
    caller = Caller(await chain(Burst(simple_config("first", is_decoupled=True), range(count))), request())
    assert caller.values() == [float(each) for each in range(count)]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_the_steps_do_each_stream_is_whole_and_in_order(seed: int) -> None:
    """Three decoupled steps in a row and one that is not, answered at random."""
    random = Random(seed)
    models = [streaming("first"), streaming("second"), HeldModel(simple_config("plain")), streaming("last")]
    caller = Caller(await chain(*models), request())
    expected: dict[float, list[float]] = {}
    number = 0.0
    while open_jobs := [
        (model, index) for model in models for index, job in enumerate(model.jobs) if not job.is_finished
    ]:
        model, index = random.choice(open_jobs)
        is_plain = model is models[2]
        if not is_plain and random.random() < 0.4:
            model.end(index)
            continue
        number += 1
        is_final = is_plain or random.random() < 0.2
        given = model.jobs[index].request.inputs["X"].array[0].item()
        expected.setdefault(given if model is not models[0] else 0.0, []).append(number)
        model.answer(index, is_final=is_final, Y=floats(number))
    assert caller.values() == _leaves(0.0, expected, depth=len(models))
    assert [each.is_final for each in caller.responses] == [False] * (len(caller.responses) - 1) + [True]


def _leaves(root: float, children: dict[float, list[float]], depth: int) -> list[float]:
    if depth == 0:
        return [root]
    return [leaf for child in children.get(root, []) for leaf in _leaves(child, children, depth - 1)]


async def test_a_model_reloaded_as_decoupled_is_refused() -> None:
    models = Lookup(HeldModel(simple_config("first")))
    model = await load(ensemble_config("first: X=a -> Y=z"), models)
    models.models["first"] = streaming("first")
    caller = Caller(model, request())
    assert caller.error.code is ErrorCode.UNIMPLEMENTED
