"""Builders of requests to an LLM, and readers of its responses."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.text.stream import StreamRecord
from sluice.pipelines.text.types import TextEvent
from sluice.serving.model import infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.engine.fake_runner import echo_next
from tests.serving.backends.builders import infer_stream

VOCAB_SIZE = 4096


class Record(StreamRecord):
    """Keeps the events of a measured request."""

    def __init__(self, model: str, protocol: str) -> None:
        self.model, self.protocol = model, protocol
        self.events: list[TextEvent] = []
        self.error: Exception | None = None
        self.is_closed = False
        self.admitted: list[tuple[int, int, str]] = []

    async def admit(self, prompt_tokens: int, max_tokens: int, adapter: str = "") -> float | None:
        self.admitted.append((prompt_tokens, max_tokens, adapter))
        return None

    def observe(self, event: TextEvent) -> None:
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        self.error = error

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def request(model: LlmModel, fields: dict[str, Any], **settings: Any) -> InferRequest:
    """Build tensors of the declared type, with a batch dimension where the model has one."""
    inputs = {name: tensor(model, name, value) for name, value in fields.items()}
    return InferRequest(inputs, **settings)


def tensor(model: LlmModel, name: str, value: Any) -> Tensor:
    spec = model.spec.inputs[name]
    if isinstance(value, np.ndarray):
        return Tensor(name, spec.data_type.name, value.shape, array=value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        value = [value]
    if spec.data_type.name == "BYTES":
        value = [each.encode() if isinstance(each, str) else each for each in value]
    array = np.array(value, spec.data_type.dtype)
    if model.spec.max_batch_size > 0:
        array = array[np.newaxis]
    return Tensor(name, spec.data_type.name, array.shape, array=array)


def outputs(response: InferResponse) -> dict[str, Any]:
    """Return outputs by name: the one element of a tensor that has one, else the nested list; bytes as text."""
    if response.error is not None:
        raise response.error
    return {each.name: _plain(each.array.tolist()) for each in response.outputs}


def _plain(value: Any) -> Any:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


async def ask(model: LlmModel, fields: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the outputs of a request that does not stream."""
    return outputs(await infer_one(model, request(model, fields, **settings)))


async def stream(model: LlmModel, fields: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """Return the outputs of each response of a request that streams."""
    async with aclosing(responses(model, fields, **settings)) as parts:
        return [outputs(part) async for part in parts]


def responses(model: LlmModel, fields: dict[str, Any], **settings: Any) -> AsyncGenerator[InferResponse, None]:
    return infer_stream(model, request(model, fields, **settings))


def echo(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the echo's runner makes after `prompt`."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(echo_next(token_ids, VOCAB_SIZE))
    return token_ids[len(prompt) :]
