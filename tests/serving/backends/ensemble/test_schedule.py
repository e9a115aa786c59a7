"""Request parameters of steps."""

import pytest

from serving.request import Parameters
from sluice.errors import SluiceError
from tests.serving.backends.ensemble.parts import (
    Caller,
    FunctionModel,
    Models,
    ensemble_config,
    load,
    request,
    simple_config,
)


async def parameters_seen(extra: str) -> dict[str, Parameters]:
    models = [FunctionModel(simple_config(name), lambda X: {"Y": X}) for name in ("find", "tell")]
    model = await load(ensemble_config("find: X=a -> Y=s; tell: X=s -> Y=z", extra=extra), Models(*models))
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
