"""Requests, their results and a context for tests of several backends."""

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.stream import Called
from sluice.serving.backend import BackendContext
from sluice.serving.model import Model, ResponseStream, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Array, Tensor
from tests.waiting import PATIENCE_S


class Lookup:
    """Loaded models by name."""

    def __init__(self, *models: Model, **named: Model) -> None:
        self.models = {model.name: model for model in models} | named

    def find(self, name: str, version: int = -1) -> Model:
        model = self.models.get(name)
        if model is None or (version != -1 and version != model.version):
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return model


CONTEXT = BackendContext(Lookup())


def request(outputs: tuple[str, ...] = (), /, **inputs: Array) -> InferRequest:
    return InferRequest({name: Tensor.of(name, array) for name, array in inputs.items()}, requested_outputs=outputs)


async def infer(model: Model, request: InferRequest) -> dict[str, Array]:
    """Return the outputs by name."""
    async with asyncio.timeout(PATIENCE_S):
        response = await infer_one(model, request)
    return {tensor.name: tensor.array for tensor in response.outputs}


def parameters(**values: str) -> str:
    """Write parameters of config.pbtxt."""
    return " ".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()
    )


async def check_batching(model: Model) -> None:
    """Ask a model for the sum and the difference of several requests at once, which it must run in fewer batches."""
    rows = [np.full((1 + index % 2, 4), index, np.float32) for index in range(5)]
    answers = await asyncio.gather(*(infer(model, request(a=row, b=np.ones_like(row))) for row in rows))
    for row, answer in zip(rows, answers, strict=True):
        assert answer["sum"].tolist() == (row + 1).tolist()
        assert answer["difference"].tolist() == (row - 1).tolist()
    assert model.statistics.execution_count < len(rows)
    assert model.statistics.inference_count == sum(len(row) for row in rows)


async def infer_stream(model: Model, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    """Yield each response of any model, the last one final. Closing the generator cancels the request."""
    arrived: asyncio.Queue[InferResponse | None] = asyncio.Queue()
    reading = asyncio.create_task(ResponseStream(model, request).pass_to(Called(arrived.put_nowait)))
    reading.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (response := await arrived.get()) is not None:
            yield response
        await reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])
