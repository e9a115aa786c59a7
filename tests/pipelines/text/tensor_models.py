"""Models with tensors of text, and the text models over them."""

from typing import Any

import numpy as np

from sluice.pipelines.text.citations import Source
from sluice.pipelines.text.model import text_model_of
from sluice.pipelines.text.tensor_model import TensorText
from sluice.pipelines.text.types import (
    ChatMessage,
    Prompt,
    TextEvent,
    TextRequest,
)
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Array, Tensor
from tests.pulled import collected
from tests.serving.backends.ensemble.parts import HeldModel, config_of

SOURCE = Source(id=1, document="guide", start=0, end=24, score=0.5, text="Tensors have a shape each")
OTHER = Source(document="notes", start=3, end=9, score=0.25, text="and more")
TURNS = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Hello"),
    ChatMessage("assistant", "Hi."),
    ChatMessage("user", "What is a tensor?"),
)


def config(inputs: str = "query", outputs: str = "response", *, batch: int = 0, more: str = "") -> HeldModel:
    lines = [f'name: "pipeline" backend: "test" max_batch_size: {batch} {more}']
    lines += [f'input {{ name: "{name}" data_type: TYPE_STRING dims: 1 }}' for name in inputs.split()]
    lines += [f'output {{ name: "{name}" data_type: TYPE_STRING dims: -1 }}' for name in outputs.split()]
    lines += [
        f'output {{ name: "{name}" data_type: TYPE_INT32 dims: 1 }}'
        for name in ("num_input_tokens", "num_output_tokens", "num_cached_tokens")
    ]
    return HeldModel(config_of("\n".join(lines)))


class Told(HeldModel):
    """Answers with given responses, the last one final."""

    def __init__(self, model: HeldModel, *responses: dict[str, Array], ends: bool = True) -> None:
        super().__init__(model.config)
        self.responses, self.ends = responses, ends

    def _start(self, job: Any) -> None:
        super()._start(job)
        for number, outputs in enumerate(self.responses):
            tensors = [Tensor.of(name, array) for name, array in outputs.items()]
            is_final = self.ends and number == len(self.responses) - 1
            job.respond(InferResponse(tensors, is_final=is_final))

    @property
    def last_request(self) -> InferRequest:
        return self.jobs[-1].request


def texts(*elements: bytes | str) -> Array:
    return np.array([each.encode() if isinstance(each, str) else each for each in elements], object)


def count(number: int) -> Array:
    return np.array([number], np.int32)


DONE = {"response": texts("")}
DECOUPLED = "model_transaction_policy { decoupled: true }"


def chat_of(model: HeldModel) -> TensorText:
    found = text_model_of(model)
    assert isinstance(found, TensorText)
    return found


def text_request(prompt: Prompt = "What is a tensor?", **fields: Any) -> TextRequest:
    return TextRequest(request_id="r1", prompt=prompt, **fields)


async def events_of(model: HeldModel, request: TextRequest | None = None) -> list[TextEvent]:
    return await collected(chat_of(model).generate, request or text_request())
