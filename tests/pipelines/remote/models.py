"""Builders of remote models, and requests to them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.pipelines.llm.services import LlmServices, RequestLimits
from sluice.pipelines.remote.backend import OpenAIBackend
from sluice.serving.backend import BackendContext
from sluice.serving.config.completion import fill_defaults
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Tensor
from tests.pipelines.llm.calls import Record
from tests.serving.backends.builders import Lookup, infer_stream

NAME = "hosted"
USER = '[{"role": "user", "content": "hello"}]'


class Load(Protocol):
    async def __call__(self, text: str = "", **parameters: object) -> Model: ...


def config_of(text: str, parameters: Mapping[str, object]) -> ModelConfig:
    """Parse the text of a config.pbtxt, and add parameters."""
    config: ModelConfig = text_format.Parse(text, ModelConfig(name=NAME, backend="openai"))
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value)
    return config


async def load_model(
    folder: Path,
    text: str,
    parameters: Mapping[str, object],
    records: list[Record],
    limits: RequestLimits | None = None,
) -> Model:
    """Load a model as the repository does."""

    def open_record(model: str, protocol: str) -> Record:
        records.append(Record(model, protocol))
        return records[-1]

    context = BackendContext(Lookup())
    backend = OpenAIBackend(LlmServices(open_record=open_record, limits=limits or RequestLimits()))
    config = await backend.complete(ModelSource(folder, 1, config_of(text, parameters)), context)
    fill_defaults(config)
    return await backend.load(ModelSource(folder, 1, config), context)


def request(model: Model, fields: Mapping[str, Any], **settings: Any) -> InferRequest:
    """Build tensors of the declared type, from the value of one row or the list of all rows' values."""
    return InferRequest({name: _tensor(model, name, value) for name, value in fields.items()}, **settings)


def _tensor(model: Model, name: str, value: Any) -> Tensor:
    spec = model.spec.inputs[name]
    elements = [each.encode() if isinstance(each, str) else each for each in _listed(value)]
    array = np.array(elements, spec.data_type.dtype)
    if model.spec.max_batch_size > 0:
        array = array[:, np.newaxis]
    return Tensor(name, spec.data_type.name, array.shape, array=array)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def plain(response: InferResponse) -> dict[str, Any]:
    """Return the one element of each output by name, bytes as text."""
    if response.error is not None:
        raise response.error
    return {each.name: _plain(each.array.ravel().tolist()) for each in response.outputs}


def _plain(elements: list[Any]) -> Any:
    shown = [each.decode() if isinstance(each, bytes) else each for each in elements]
    return shown[0] if len(shown) == 1 else shown


async def ask(model: Model, fields: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the outputs of a request that does not stream."""
    return plain(await infer_one(model, request(model, fields, **settings)))


async def stream(model: Model, fields: Mapping[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """Return the outputs of each response of a request that streams."""
    streamed = request(model, fields, streams_by_default=True, **settings)
    return [plain(response) async for response in infer_stream(model, streamed)]


async def refusal(model: Model, fields: Mapping[str, Any], **settings: Any) -> SluiceError:
    """Return the error of a request that does not stream."""
    try:
        answer = await ask(model, fields, **settings)
    except SluiceError as error:
        return error
    raise AssertionError(f"it was answered: {answer}")
