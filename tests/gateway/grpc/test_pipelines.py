"""Ensembles whose language model streams only on request."""

from typing import Any

import numpy as np

from serving.backends.ensemble.backend import EnsembleModel
from serving.request import InferRequest
from tests.gateway.grpc.parts import failure, infer_request, serving, set_parameters
from tests.gateway.v2.small_service import SmallService
from tests.serving.backends.ensemble.parts import FunctionModel, Models, config_of, ensemble_config, load


class OnRequest(FunctionModel):
    """A model that is decoupled like an LLM: for requests that say so."""

    def is_decoupled_for(self, request: InferRequest) -> bool:
        return bool(request.parameters.get("stream", False))


TEXT = (
    'name: "talk" backend: "test" input { name: "X" data_type: TYPE_INT32 dims: -1 } '
    'output { name: "Y" data_type: TYPE_INT32 dims: -1 } model_transaction_policy { decoupled: true }'
)


async def pipeline() -> tuple[EnsembleModel, OnRequest]:
    talk = OnRequest(config_of(TEXT), lambda X: {"Y": X + 1})
    config = ensemble_config("talk: X=query -> Y=response", inputs="", outputs="")
    for tensor, name in ((config.input.add(), "query"), (config.output.add(), "response")):
        tensor.name, tensor.data_type = name, 8
        tensor.dims.append(-1)
    return await load(config, Models(talk)), talk


def asking(**parameters: bool) -> Any:
    request = infer_request("whole", 1, 2)
    request.inputs[0].name = "query"
    set_parameters(request.parameters, parameters)
    return request


async def test_a_unary_call_gets_its_one_response() -> None:
    model, _ = await pipeline()
    async with serving(SmallService(model)) as running:
        response = await running.stub.ModelInfer(asking())
        assert np.frombuffer(response.raw_output_contents[0], np.int32).tolist() == [2, 3]


async def test_a_unary_call_that_asks_to_stream_is_refused() -> None:
    model, talk = await pipeline()
    async with serving(SmallService(model)) as running:
        code, message = await failure(running.stub.ModelInfer(asking(stream=True)))
        assert (code, message) == (
            "UNIMPLEMENTED",
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        )
    assert not talk.requests
