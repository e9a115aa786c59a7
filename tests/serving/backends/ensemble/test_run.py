"""Order of steps, errors, cancellation, and the requests that steps get."""

import asyncio
import contextlib
import gc
import weakref
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.model import infer_one
from sluice.serving.request import InferResponse, Parameters, SequenceFlag
from sluice.serving.tensors.tensor import Array, Tensor
from tests.recordings import find_span, parents, recorded
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import (
    Caller,
    FunctionModel,
    HeldModel,
    Script,
    ensemble_config,
    floats,
    load,
    request,
    simple_config,
)
from tests.waiting import PATIENCE_S

CHAIN = "first: X=a -> Y=b; second: X=b -> Y=z"
FOUND = "find: X=a -> Y=s; talk: X=s -> Y=z"
ONE = "ensemble_scheduling { max_inflight_requests: 1 }"
DIAMOND = "head: X=a -> Y=b; left: X=b -> Y=c; right: X=b -> Y=d; tail: X=c W=d -> Y=z"


HELD: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "each step starts when the last of its inputs is there": (
        *(DIAMOND, {}, "head=2 right=3 left=4 tail=5"),
        ">head 1 | >left 2 >right 2 |  | >tail 3,4 | z=5.",
    ),
    "the order of the configuration is none": (
        *("second: X=b -> Y=z; first: X=a -> Y=b", {}, "first=2 second=20"),
        ">first 1 | >second 2 | z=20.",
    ),
    "a step that leaves out all its outputs has still answered": (
        *("first: X=a -> Y=b; second: X=a W=b -> Y=z", {"optional": "W"}, "first= second=4"),
        ">first 1 | >second 1 | z=4.",
    ),
    "only what is asked for runs": (
        *("head: X=a -> Y=b; left: X=b -> Y=y; right: X=b -> Y=z", {"outputs": "yz", "asked": "z"}, "head=2 right=3"),
        ">head 1 | >right 2 | z=3.",
    ),
    "a cancelled request cancels every step that runs": (
        *(DIAMOND, {}, "head=2 -"),
        ">head 1 | >left 2 >right 2 | xleft xright",
    ),
    "an error ends the request and cancels the other branch": (
        *(DIAMOND, {}, "head=2 left!bad"),
        ">head 1 | >left 2 >right 2 | xleft xright (in ensemble 'whole', model 'left': bad).",
    ),
    "responses of steps that overtake each other keep their order": (
        *(CHAIN, {"streams": "first"}, "first~0 first~1 first~2 first=3 second.2=2 second.1=1 second.0=0 second.3=3"),
        "~ >first 1 | >second 0 | >second 1 | >second 2 | >second 3 |  |  | z=0 z=1 z=2 | z=3.",
    ),
    "an error within the stream ends it": (
        *(CHAIN, {"streams": "first"}, "first~1 second=1 first~2 first!bad"),
        "~ >first 1 | >second 1 | z=1 | >second 2 | xfirst xsecond (in ensemble 'whole', model 'first': bad).",
    ),
    "cancelling in the middle reaches every step": (
        *(CHAIN, {"streams": "first second"}, "first~1 first~2 second~1 -"),
        "~ >first 1 | >second 1 | >second 2 | z=1 | xfirst xsecond xsecond",
    ),
    "a limited step loses nothing of the stream": (
        *(CHAIN, {"streams": "first", "extra": ONE}, "first~0 first~1 first=2 second=0 second.1=1 second.2=2"),
        "~ >first 1 | >second 0 |  |  | z=0 >second 1 | z=1 >second 2 | z=2.",
    ),
    "nor where the step behind it answers at once": (
        *("first: X=a -> Y=b; second: X=b -> Y=c; copy: X=c -> Y=z", {"streams": "first", "extra": ONE}),
        *("first~0 first=1 second=0 second.1=1", "~ >first 1 | >second 0 |  | z=0 >second 1 | z=1."),
    ),
    "a plain step may say its end later": ("only: X=a -> Y=z", {}, "only~1 only=", ">only 1 | z=1 | ."),
    "outputs before the stream go out once": (
        *(FOUND, {"streams": "talk", "outputs": "zs"}, "find=7 talk~1 talk=2"),
        "~ >find 1 | >talk 7 s=7 | z=1 | z=2.",
    ),
    "what only lies before the stream is one response": (
        *(FOUND, {"streams": "talk", "outputs": "zs", "asked": "s"}, "find=7"),
        ">find 1 | s=7.",
    ),
    "each response of a stream meets what lies before it, where the stream begins then": (
        *("find: X=a -> Y=s; talk: X=a -> Y=t; join: X=s W=t -> Y=z", {"streams": "talk"}, "find=7 talk~1 talk=2"),
        "~ >find 1 | >talk 1 | z=701 | z=702.",
    ),
    "the request's own values reach through two streams": (
        "outer: X=a -> Y=t; inner: X=t -> Y=u; join: X=b W=u -> Y=z",
        {"streams": "outer inner", "inputs": "ab", "outputs": "zt"},
        "outer~1 inner~11 outer=2 inner.1=21 inner=12",
        "~ >outer 1 | >inner 1 t=1 | z=511 | >inner 2 |  | z=512 t=2 z=521.",
    ),
}


@pytest.mark.parametrize("case", HELD)
async def test_what_each_answer_of_a_step_leads_to(case: str) -> None:
    steps, options, words, expected = HELD[case]
    given = {
        "join": FunctionModel(simple_config("join", inputs="XW"), lambda X, W: {"Y": X * 100 + W}),
        "copy": FunctionModel(simple_config("copy"), lambda X: {"Y": X}),
    }
    options = {"given": given} | options
    inputs = {name: floats(value) for name, value in zip(options.get("inputs", "a"), (1, 5), strict=False)}
    asked = request(inputs, outputs=tuple(options.pop("asked", "")))
    assert await Script(steps, **options).play(words, asked) == expected


async def diamond() -> tuple[Lookup, dict[str, HeldModel]]:
    held = {name: HeldModel(simple_config(name)) for name in ("head", "left", "right")}
    held["tail"] = HeldModel(simple_config("tail", inputs="XW"))
    models = Lookup(*held.values())
    await load(ensemble_config(DIAMOND), models)
    return models, held


async def test_a_tensor_is_handed_on_and_not_copied() -> None:
    models, held = await diamond()
    given, made = np.ones(2_500_000, np.float32), np.ones(2_500_000, np.float32)
    caller = Caller(models.find("whole"), request({"a": given}))
    assert held["head"].jobs[0].request.inputs["X"].array is given
    held["head"].answer(0, Y=made)
    assert held["left"].jobs[0].request.inputs["X"].array is made
    assert held["right"].jobs[0].request.inputs["X"].array is made
    held["left"].answer(0, Y=made)
    held["right"].answer(0, Y=made)
    held["tail"].answer(0, Y=made)
    assert caller.only.outputs[0].array is made


async def test_wire_bytes_are_handed_on_and_not_copied() -> None:
    first = HeldModel(simple_config("first"))
    second = HeldModel(simple_config("second"))
    model = await load(ensemble_config(CHAIN), Lookup(first, second))
    caller = Caller(model, request())
    wire = memoryview(floats(1, 2, 3).tobytes())
    first.jobs[0].respond(InferResponse([Tensor("Y", "FP32", (3,), raw=wire)]))
    assert second.jobs[0].request.inputs["X"].raw is wire
    second.jobs[0].respond(InferResponse([Tensor("Y", "FP32", (3,), raw=wire)]))
    assert caller.only.outputs[0].raw is wire


async def test_each_step_runs_in_its_request_s_context() -> None:
    """A step may begin in the context of another request, whose batch its input came from."""
    who: ContextVar[str] = ContextVar("who", default="nobody")
    seen: list[str] = []

    def note(X: Array) -> dict[str, Array]:
        seen.append(who.get())
        return {"Y": X}

    first = HeldModel(simple_config("first"))
    model = await load(ensemble_config(CHAIN), Lookup(first, FunctionModel(simple_config("second"), note)))
    for name in ("one", "two"):
        who.set(name)
        Caller(model, request())
    who.set("batch")
    for index in (0, 1):
        first.answer(index, Y=floats(1))
    assert seen == ["one", "two"]


async def test_outputs_come_last_of_the_configuration_first() -> None:
    model = await load(
        ensemble_config("both: X=a -> P=y Q=z", outputs="zy"),
        Lookup(FunctionModel(simple_config("both", outputs="PQ"), lambda X: {"P": X, "Q": -X})),
    )
    response = await infer_one(model, request())
    assert [each.name for each in response.outputs] == ["y", "z"]
    assert response.outputs[1].array.tolist() == [-1.0]


async def test_the_error_of_a_step_keeps_its_code_and_the_name_of_the_field() -> None:
    models, held = await diamond()
    caller = Caller(models.find("whole"), request())
    held["head"].jobs[0].fail(SluiceError(ErrorCode.UNAVAILABLE, "out of order", param="X"))
    assert (caller.error.code, caller.error.param) == (ErrorCode.UNAVAILABLE, "X")


async def test_what_a_step_refuses_is_the_request_s_error() -> None:
    first = FunctionModel(simple_config("first"), lambda X: {"Y": X.reshape(-1, 1)})
    model = await load(ensemble_config(CHAIN), Lookup(first, HeldModel(simple_config("second"))))
    with pytest.raises(SluiceError) as caught:
        await infer_one(model, request(id="7"))
    assert caught.value.message.startswith("in ensemble 'whole', [request id: 7] unexpected shape for input 'X'")
    assert caught.value.code is ErrorCode.INVALID
    assert model.num_in_flight == 0


async def test_a_step_that_is_gone_refuses_the_request_before_any_step_runs() -> None:
    first, second = HeldModel(simple_config("first")), HeldModel(simple_config("second"))
    models = Lookup(first, second)
    model = await load(ensemble_config(CHAIN), models)
    del models.models["second"]
    with pytest.raises(SluiceError, match="'second' is not found"):
        Caller(model, request())
    assert not first.jobs
    assert model.num_in_flight == 0
    assert not model.is_ready


async def test_a_request_keeps_the_models_that_it_began_with() -> None:
    first, old = HeldModel(simple_config("first")), FunctionModel(simple_config("second"), lambda X: {"Y": X * 2})
    models = Lookup(first, old)
    whole = await load(ensemble_config(CHAIN), models)
    caller = Caller(whole, request())
    models.models["second"] = FunctionModel(simple_config("second"), lambda X: {"Y": X * 3})
    unloading = asyncio.create_task(old.unload())
    await asyncio.sleep(0)
    assert not unloading.done(), "it is held by the request under way"
    first.answer(0, Y=floats(2))
    assert caller.values() == [4.0]
    await unloading
    second = Caller(whole, request())
    first.answer(1, Y=floats(2))
    assert second.values() == [6.0]
    assert all(model.num_in_flight == 0 for model in (whole, first, *models.models.values()))


async def test_a_model_that_is_going_away_begins_nothing_new() -> None:
    first, second = HeldModel(simple_config("first")), HeldModel(simple_config("second"))
    whole = await load(ensemble_config(CHAIN), Lookup(first, second))
    await second.unload()
    with pytest.raises(SluiceError, match="'second' version 1 is being unloaded"):
        Caller(whole, request())
    assert first.num_in_flight == whole.num_in_flight == 0


async def test_a_fixed_version_is_asked_for() -> None:
    config = ensemble_config(CHAIN)
    config.ensemble_scheduling.step[0].model_version = 1
    first = HeldModel(simple_config("first"))
    models = Lookup(first, HeldModel(simple_config("second")))
    Caller(await load(config, models), request())
    assert len(first.jobs) == 1
    config.ensemble_scheduling.step[0].model_version = 2
    with pytest.raises(SluiceError, match="ensemble 'whole' depends on 'first' whose required version 2 is not loaded"):
        await load(config, models)


async def test_steps_are_asked_as_the_ensemble_was() -> None:
    first, second = HeldModel(simple_config("first")), HeldModel(simple_config("second"))
    model = await load(ensemble_config(CHAIN), Lookup(first, second))
    given = request(id="r", parameters={"p": 1}, priority=2, correlation_id=4, sequence=SequenceFlag.START)
    given.tenant, given.protocol = "t", "v2_grpc"
    caller = Caller(model, given)
    first.answer(0, Y=floats(2))
    for each in (first, second):
        asked = each.jobs[0].request
        assert (asked.id, asked.parameters, asked.priority) == ("r", {"p": 1}, 2)
        assert (asked.correlation_id, asked.sequence) == (4, SequenceFlag.START)
        assert (asked.tenant, asked.protocol, asked.requested_outputs) == ("t", "v2_grpc", ("Y",))
    second.answer(0, Y=floats(2))
    assert caller.only.parameters == {"sequence_id": 4, "sequence_start": True, "sequence_end": False}


async def chain(*, streams: bool) -> tuple[EnsembleModel, HeldModel, HeldModel]:
    """Load two steps, of which the second may give any number of responses."""
    first, second = HeldModel(simple_config("first")), HeldModel(simple_config("second", is_decoupled=streams))
    return await load(ensemble_config(CHAIN), Lookup(first, second)), first, second


@pytest.mark.parametrize(("streams", "most"), [(True, 1_000_000), (False, 3_000_000)])
async def test_a_time_limit_is_shared_by_the_steps_where_one_streams(streams: bool, most: int) -> None:
    """Otherwise each step has all of it."""
    model, first, second = await chain(streams=streams)
    caller = Caller(model, request(timeout_us=3_000_000))
    caller.job.started_ns -= 2_000_000_000
    first.answer(0, Y=floats(2))
    left = second.jobs[0].request.timeout_us
    assert 0 < left <= most
    assert streams or left == most


async def test_a_time_limit_ends_a_step_that_knows_none() -> None:
    model, first, _ = await chain(streams=True)
    late: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
    model.submit(request(timeout_us=1_000), late.set_result)
    async with asyncio.timeout(PATIENCE_S):
        error = (await late).error
    assert error is not None
    assert error.code is ErrorCode.DEADLINE
    assert error.message == "in ensemble 'whole', model 'first': the request was not complete within its 0.001 s"
    assert first.num_cancelled == 1
    assert model.num_in_flight == 0


async def test_a_step_s_response_may_move_on_to_another_sequence() -> None:
    first, second = HeldModel(simple_config("first")), HeldModel(simple_config("second"))
    caller = Caller(await load(ensemble_config(CHAIN), Lookup(first, second)), request())
    first.answer(0, parameters={"sequence_id": "other", "sequence_end": True}, Y=floats(1))
    assert (second.jobs[0].request.correlation_id, second.jobs[0].request.sequence) == ("other", SequenceFlag.END)
    second.answer(0, Y=floats(1))
    assert caller.only.parameters == {"sequence_id": "other", "sequence_start": False, "sequence_end": True}


async def test_a_sequence_of_a_wrong_type_fails_the_request() -> None:
    first = HeldModel(simple_config("first"))
    caller = Caller(await load(ensemble_config("first: X=a -> Y=z"), Lookup(first)), request())
    first.answer(0, parameters={"sequence_start": 1}, Y=floats(1))
    assert "expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL" in caller.error.message


async def test_an_optional_input_that_is_not_given_reaches_no_step() -> None:
    first = FunctionModel(
        simple_config("first", inputs="XW", optional="W"), lambda X, W=None: {"Y": X if W is None else W}
    )
    config = ensemble_config("first: X=a W=b -> Y=z", inputs="ab")
    config.input[1].optional = True
    model = await load(config, Lookup(first))
    assert (await infer_one(model, request())).outputs[0].array.tolist() == [1.0]
    assert list(first.requests[0].inputs) == ["X"]
    given = request({"a": floats(1), "b": floats(2)})
    assert (await infer_one(model, given)).outputs[0].array.tolist() == [2.0]


async def test_an_output_that_a_step_leaves_out_may_be_an_optional_input(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    first, second = (
        HeldModel(simple_config("first", outputs="YV")),
        HeldModel(simple_config("second", inputs="XW", optional="W")),
    )
    model = await load(ensemble_config("first: X=a -> Y=b V=c; second: X=b W=c -> Y=z"), Lookup(first, second))
    caller = Caller(model, request())
    first.answer(0, Y=floats(2))
    assert list(second.jobs[0].request.inputs) == ["X"]
    second.answer(0)
    assert caller.only.outputs == []
    assert caller.only.error is None
    assert "in ensemble 'whole': Composing models did not output tensor z" in caplog.messages


async def test_ensembles_within_ensembles() -> None:
    models = Lookup(FunctionModel(simple_config("twice"), lambda X: {"Y": X * 2}))
    inner = ensemble_config("twice: X=a -> Y=z")
    inner.name = "inner"
    await load(inner, models)
    model = await load(ensemble_config("inner: a=a -> z=b; inner: a=b -> z=z"), models)
    assert (await infer_one(model, request())).outputs[0].array.tolist() == [4.0]


async def test_closing_ends_what_is_under_way() -> None:
    first = HeldModel(simple_config("first"))
    model = await load(ensemble_config("first: X=a -> Y=z"), Lookup(first))
    caller = Caller(model, request())
    await model.close()
    assert caller.error.code is ErrorCode.UNAVAILABLE
    assert first.num_cancelled == 1
    with pytest.raises(SluiceError):
        Caller(model, request())


LIMITED = "ensemble_scheduling { max_inflight_requests: 2 }"


async def test_a_limited_step_takes_the_next_request_when_one_has_ended() -> None:
    first = HeldModel(simple_config("first"))
    model = await load(ensemble_config("first: X=a -> Y=z", extra=LIMITED), Lookup(first))
    callers = [Caller(model, request({"a": floats(index)})) for index in range(4)]
    assert len(first.jobs) == 2
    callers[2].job.cancel()
    first.answer(0, Y=floats(0))
    assert [job.request.inputs["X"].array.tolist() for job in first.jobs] == [[0.0], [1.0], [3.0]]
    late = Caller(model, request())
    assert len(first.jobs) == 3
    callers[1].job.cancel()
    assert len(first.jobs) == 4
    first.answer(2, Y=floats(3))
    first.answer(3, Y=floats(9))
    assert (callers[3].values(), late.values()) == ([3.0], [9.0])


async def test_what_a_limited_step_refuses_takes_no_place() -> None:
    first = HeldModel(simple_config("first", dims="2"))
    model = await load(ensemble_config("first: X=a -> Y=z", extra=LIMITED), Lookup(first))
    for _ in range(3):
        assert "unexpected shape" in Caller(model, request({"a": floats(1)})).error.message
    Caller(model, request({"a": floats(1, 2)}))
    assert len(first.jobs) == 1


async def test_nothing_is_kept_of_a_request_that_is_over() -> None:
    first = HeldModel(simple_config("first"))
    models = Lookup(first)
    model = await load(ensemble_config("first: X=a -> Y=z"), models)
    answered, refused = floats(1), floats(2)
    kept = [weakref.ref(answered), weakref.ref(refused)]
    Caller(model, request({"a": answered}))
    first.answer(0, Y=floats(1))
    first.jobs.clear()
    del models.models["first"]
    with contextlib.suppress(SluiceError):
        Caller(model, request({"a": refused}))
    del answered, refused
    gc.collect()
    assert [each() for each in kept] == [None, None]


async def parameters_seen(extra: str) -> dict[str, Parameters]:
    models = [FunctionModel(simple_config(name), lambda X: {"Y": X}) for name in ("find", "tell")]
    model = await load(ensemble_config("find: X=a -> Y=s; tell: X=s -> Y=z", extra=extra), Lookup(*models))
    Caller(model, request(parameters={"top_k": 3, "key": "secret", "stream": False}))
    return {each.name: each.requests[0].parameters for each in models}


async def test_all_reach_every_step() -> None:
    whole = {"top_k": 3, "key": "secret", "stream": False}
    assert await parameters_seen("") == {"find": whole, "tell": whole}


async def test_those_of_one_step_reach_no_other() -> None:
    seen = await parameters_seen('parameters { key: "step_parameters.find" value { string_value: "top_k, key" } }')
    assert seen == {"find": {"top_k": 3, "key": "secret", "stream": False}, "tell": {"stream": False}}


async def test_several_steps_may_share_one() -> None:
    seen = await parameters_seen(
        'parameters { key: "step_parameters.find" value { string_value: "top_k,key" } } '
        'parameters { key: "step_parameters.tell" value { string_value: "key" } }'
    )
    assert seen["tell"] == {"key": "secret", "stream": False}
    assert seen["find"] == {"top_k": 3, "key": "secret", "stream": False}


async def test_a_step_that_there_is_not() -> None:
    with pytest.raises(SluiceError, match="is for 'other', which no step calls") as caught:
        await parameters_seen('parameters { key: "step_parameters.other" value { string_value: "key" } }')
    assert caught.value.param == "step_parameters.other"


async def test_each_step_is_a_span_of_the_ensemble() -> None:
    models = Lookup(
        FunctionModel(simple_config("first"), lambda X: {"Y": X + 1}),
        FunctionModel(simple_config("second"), lambda X: {"Y": X * 10}),
    )
    model = await load(ensemble_config("first: X=a -> Y=b; second: X=b -> Y=z"), models)
    with recorded() as recording:
        await infer_one(model, request())
    assert recording.is_complete
    found = parents(recording)
    assert found["infer whole"] == "test"
    assert found["infer first"] == found["infer second"] == "infer whole"
    first, second = find_span(recording, "infer first"), find_span(recording, "infer second")
    assert first.ended_ns <= second.ended_ns
    assert find_span(recording, "infer whole").attributes["sluice.platform"] == "ensemble"
