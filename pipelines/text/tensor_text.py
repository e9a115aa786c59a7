"""A model over tensors as a text model: an ensemble that answers questions, or a hosted language model."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import invalid
from engine.validation import check_sampling
from pipelines.inference.call import infer_stream
from pipelines.inference.types import InferRequest
from pipelines.tensors.datatypes import BYTES
from pipelines.tensors.tensor import Tensor
from pipelines.text.defaults import SamplingDefaults
from pipelines.text.messages import encode_messages
from pipelines.text.model import refuse_parameters
from pipelines.text.sampling_parameters import as_parameters
from pipelines.text.tensor_answer import SOURCES, TOLD, TensorAnswer
from pipelines.text.tensor_face import TensorFace
from pipelines.text.types import (
    ChatMessage,
    EncodedPrompt,
    PlainPrompt,
    Prompt,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)

if TYPE_CHECKING:
    from pipelines.inference.model import Model

HISTORY = "history"
"""The request parameter with the turns before the question, as JSON."""
_ENSEMBLE = "ensemble"
_US_PER_S = 1_000_000
_ANY_LENGTH = 2**31 - 1


class TensorText:
    """Asks the model through `face`, with the language model's other inputs as request parameters."""

    is_measured = True
    max_model_len = None
    max_beam_width = 1
    parent = None
    failure = None

    def __init__(self, model: "Model", face: TensorFace) -> None:
        self._model = model
        self._face = face

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def version(self) -> str:
        return str(self._model.version)

    @property
    def created(self) -> int:
        """When the model was loaded, in seconds since 1970."""
        return self._model.created

    @property
    def takes_parameters(self) -> bool:
        """Whether there may be steps that read them: an ensemble has steps, and who tells sources has found them."""
        spec = self._model.spec
        return spec.platform == _ENSEMBLE or SOURCES in spec.outputs

    async def prepare_shared(self, prompt: PlainPrompt) -> Prompt:
        """As it is: the model makes tokens of it itself."""
        return prompt

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """As `TextModel.generate`. Refused, by their names, are fields that do not pass through tensors."""
        if not self.takes_parameters:
            refuse_parameters(self.name, request)
        _check_ranges(request.sampling)
        answer = TensorAnswer(self.name, self._face.output.name)
        async with aclosing(infer_stream(self._model, self._infer_request(request))) as responses:
            async for response in responses:
                for event in answer.events(response):
                    yield event

    def _infer_request(self, request: TextRequest) -> InferRequest:
        text, history = self._asked(request.prompt)
        parameters = {**as_parameters(request, self.name), **request.parameters}
        if history:
            parameters[HISTORY] = encode_messages(history).decode()
        if self._model.spec.is_decoupled:
            parameters["stream"] = True
        shape = (1, 1) if self._model.spec.max_batch_size > 0 else (1,)
        name = self._face.input.name
        element = np.array([text], np.object_).reshape(shape)
        return InferRequest(
            {name: Tensor(name, BYTES.name, shape, array=element)},
            id=request.request_id,
            requested_outputs=self._outputs(),
            parameters=parameters,
            protocol=request.protocol,
            priority=request.priority,
            timeout_us=_microseconds(request.timeout_s),
            queue_timeout_us=_microseconds(request.queue_timeout_s),
            tenant=request.tenant,
        )

    def _outputs(self) -> tuple[str, ...]:
        """Those that make the answer: what only others would need is not computed."""
        return tuple(name for name in self._model.spec.outputs if name == self._face.output.name or name in TOLD)

    def _asked(self, prompt: Prompt) -> tuple[bytes, Sequence[ChatMessage]]:
        """What the input takes, and the turns before it that the input does not."""
        if isinstance(prompt, EncodedPrompt):
            prompt = prompt.source
        if isinstance(prompt, list):
            raise invalid("prompt", f"model '{self.name}' takes text, not token ids")
        if isinstance(prompt, str):
            prompt = (ChatMessage("user", prompt),)
        if self._face.takes_messages:
            return encode_messages(prompt), ()
        *history, question = prompt
        if question.role != "user":
            message = f"model '{self.name}' answers a question, so the last message must be the user's"
            raise invalid("messages", f"{message}, got the role {question.role!r}")
        return question.content.encode(), history


def _check_ranges(sent: SamplingOverrides) -> None:
    """Raises INVALID for fields out of range: the language model would say so only with the sources on the wire."""
    check_sampling(SamplingDefaults().resolve(sent, sent.max_tokens or _ANY_LENGTH))


def _microseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, round(seconds * _US_PER_S))
