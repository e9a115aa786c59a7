"""Tensors from before a decoupled step join those from after it."""

from random import Random

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
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


def streaming(name: str, *, inputs: str = "X") -> HeldModel:
    return HeldModel(simple_config(name, inputs=inputs, is_decoupled=True))


def plain(name: str, *, inputs: str = "X") -> HeldModel:
    return HeldModel(simple_config(name, inputs=inputs))


def joining() -> FunctionModel:
    return FunctionModel(simple_config("join", inputs="XW"), lambda X, W: {"Y": X * 100 + W})


def names(responses: list[InferResponse]) -> list[list[str]]:
    return [[tensor.name for tensor in response.outputs] for response in responses]


class OnRequest(HeldModel):
    """Decoupled as an LLM is: only for requests that ask for it."""

    def is_decoupled_for(self, request: InferRequest) -> bool:
        return bool(request.parameters.get("stream", request.streams_by_default))


def on_request(name: str = "talk") -> OnRequest:
    return OnRequest(simple_config(name, is_decoupled=True))


async def found_and_told(talk: HeldModel) -> tuple[EnsembleModel, HeldModel]:
    """Load an ensemble with a step whose output is one of the ensemble and the input of the streaming step."""
    find = plain("find")
    config = ensemble_config("find: X=a -> Y=s; talk: X=s -> Y=z", outputs="zs")
    return await load(config, Lookup(find, talk)), find


async def test_steps_that_answer_at_once_keep_the_order() -> None:
    class Burst(HeldModel):
        def _start(self, job: InferJob) -> None:
            super()._start(job)
            for value in range(3):
                self.answer(-1, is_final=value == 2, Y=floats(value))

    find = FunctionModel(simple_config("find"), lambda X: {"Y": X + 6})
    config = ensemble_config("find: X=a -> Y=s; talk: X=s -> Y=z", outputs="zs")
    model = await load(config, Lookup(find, Burst(simple_config("talk", is_decoupled=True))))
    caller = Caller(model, request())
    assert names(caller.responses) == [["s"], ["z"], ["z"], ["z"]]
    assert caller.responses[-1].is_final


async def test_a_request_that_does_not_stream_gets_one_response_with_all() -> None:
    talk = on_request()
    model, find = await found_and_told(talk)
    asked = request()
    assert model.spec.is_decoupled
    assert not model.is_decoupled_for(asked)
    caller = Caller(model, asked)
    find.answer(0, Y=floats(7))
    assert not caller.responses
    talk.answer(0, Y=floats(1))
    assert names(caller.responses) == [["s", "z"]]
    assert caller.only.is_final


@pytest.mark.parametrize("by_default", [False, True])
async def test_a_request_that_asks_for_it_streams(by_default: bool) -> None:
    talk = on_request()
    model, find = await found_and_told(talk)
    asked = request(parameters={} if by_default else {"stream": True})
    asked.streams_by_default = by_default
    assert model.is_decoupled_for(asked)
    caller = Caller(model, asked)
    find.answer(0, Y=floats(7))
    talk.answer(0, is_final=False, Y=floats(1))
    assert names(caller.responses) == [["s"], ["z"]]
    caller.job.cancel()
    assert talk.num_cancelled == 1


async def test_an_input_of_the_ensemble_may_say_that_it_streams() -> None:
    class ByInput(HeldModel):
        def is_decoupled_for(self, request: InferRequest) -> bool:
            return "W" in request.inputs and bool(request.inputs["W"].array[0])

    talk = ByInput(simple_config("talk", inputs="XW", is_decoupled=True))
    model = await load(ensemble_config("talk: X=a W=w -> Y=z", inputs="aw"), Lookup(talk))
    for value in (0.0, 1.0):
        assert model.is_decoupled_for(request({"a": floats(1), "w": floats(value)})) is bool(value)


async def test_an_ensemble_of_an_ensemble_streams_as_that_does() -> None:
    models = Lookup(on_request())
    inner = ensemble_config("talk: X=a -> Y=z")
    inner.name = "inner"
    await load(inner, models)
    outer = await load(ensemble_config("inner: a=a -> z=z"), models)
    assert not outer.is_decoupled_for(request())
    assert outer.is_decoupled_for(request(parameters={"stream": True}))


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_the_order_every_response_meets_its_own(seed: int) -> None:
    random = Random(seed)
    outer, inner, find = streaming("outer"), streaming("inner"), plain("find")
    steps = "find: X=a -> Y=s; outer: X=a -> Y=t; inner: X=t -> Y=u; join: X=s W=u -> Y=z"
    caller = Caller(await load(ensemble_config(steps, outputs="zts"), Lookup(find, outer, inner, joining())), request())
    models, number = [find, outer, inner], 0
    told: dict[float, list[float]] = {}
    while open_jobs := [(each, i) for each in models for i, job in enumerate(each.jobs) if not job.is_finished]:
        model, index = random.choice(open_jobs)
        if model is find:
            find.answer(0, Y=floats(0))
            continue
        if random.random() < 0.3:
            model.end(index)
            continue
        number += 1
        if model is outer:
            told[number] = []
        else:
            told[model.jobs[index].request.inputs["X"].array[0].item()].append(number)
        model.answer(index, is_final=random.random() < 0.2, Y=floats(number))
    expected = [[("t", key), *(("z", value) for value in values)] for key, values in told.items()]
    seen = [(tensor.name, tensor.array[0].item()) for each in caller.responses for tensor in each.outputs]
    assert seen == [("s", 0.0), *(pair for group in expected for pair in group)]
    assert [each.is_final for each in caller.responses] == [False] * (len(caller.responses) - 1) + [True]


async def test_a_model_that_streams_after_all_is_refused() -> None:
    class Surprising(OnRequest):
        def is_decoupled_for(self, request: InferRequest) -> bool:
            return "X" in request.inputs

    find, talk = plain("find"), Surprising(simple_config("talk", is_decoupled=True))
    config = ensemble_config("find: X=a -> Y=s; talk: X=s -> Y=z")
    caller = Caller(await load(config, Lookup(find, talk)), request())
    find.answer(0, Y=floats(1))
    assert caller.error.code is ErrorCode.UNIMPLEMENTED
    assert "model 'talk' gives any number of responses" in caller.error.message


async def test_schedules_for_all_that_clients_ask_are_bounded() -> None:
    letters = "bcdefgh"
    steps = ";".join(f"m{each}: X=a -> Y={each}" for each in letters)
    models = [FunctionModel(simple_config(f"m{each}"), lambda X: {"Y": X}) for each in letters]
    model = await load(ensemble_config(steps, outputs=letters), Lookup(*models))
    for mask in range(1, 2 ** len(letters)):
        wanted = tuple(each for bit, each in enumerate(letters) if mask >> bit & 1)
        caller = Caller(model, request(outputs=wanted))
        assert set(names(caller.responses)[0]) == set(wanted)
    assert model._plan.find_schedule.cache_info().currsize <= 64  # type: ignore[attr-defined]


async def test_an_error_names_the_step_that_cannot_serve_now() -> None:
    talk = streaming("talk")
    model, find = await found_and_told(talk)
    caller = Caller(model, request())
    find.answer(0, Y=floats(7))
    error = SluiceError(ErrorCode.UNAVAILABLE, "the engine failed", param="X", retry_after_s=2)
    talk.jobs[0].fail(error)
    told = caller.responses[-1].error
    assert told is not None
    assert told.message == "in ensemble 'whole', model 'talk': the engine failed"
    assert (told.code, told.param, told.retry_after_s) == (ErrorCode.UNAVAILABLE, "X", 2)


@pytest.mark.parametrize(
    ("code", "message"), [(ErrorCode.INTERNAL, "boom"), (ErrorCode.UNAVAILABLE, "model 'talk' is gone")]
)
async def test_what_a_model_says_itself_is_told_as_it_is(code: ErrorCode, message: str) -> None:
    talk = streaming("talk")
    model, find = await found_and_told(talk)
    caller = Caller(model, request())
    find.answer(0, Y=floats(7))
    talk.jobs[0].fail(SluiceError(code, message))
    assert caller.responses[-1].error is not None
    assert caller.responses[-1].error.message == f"in ensemble 'whole', {message}"
