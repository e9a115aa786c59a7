"""A model over tensors as a text model: an ensemble that answers questions, or a hosted language model."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import singledispatch
from weakref import WeakKeyDictionary

import numpy as np

from engine.validation import check_sampling
from pipelines.text.defaults import SamplingDefaults
from pipelines.text.messages import encode_messages
from pipelines.text.model import TextModel, refuse_parameters
from pipelines.text.sampling_parameters import as_parameters
from pipelines.text.tensor_answer import SOURCES, TOLD, TensorAnswer
from pipelines.text.tensor_face import TensorFace, face_of
from pipelines.text.types import (
    ChatMessage,
    EncodedPrompt,
    PlainPrompt,
    Prompt,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)
from serving.model import Model, infer_stream
from serving.request import InferRequest
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Tensor
from sluice.errors import invalid

HISTORY = "history"
"""The request parameter with the turns before the question, as JSON."""
_ENSEMBLE = "ensemble"
_US_PER_S = 1_000_000
_ANY_LENGTH = 2**31 - 1


_signatures: WeakKeyDictionary[Model, TensorFace | None] = WeakKeyDictionary()
"""Reading a configuration is slow, and every request to an OpenAI route looks at every model."""


@singledispatch
def text_model_of(model: Model) -> TextModel | None:
    """Return what generates text for `model`; None for a model that cannot be asked with one text.

    Kinds of models that are language models themselves register what they answer with. Any other is asked through its
    tensors, where they are a question and a text. Raises SluiceError INVALID where a parameter of its configuration
    names a tensor that cannot be one.
    """
    if model not in _signatures:
        _signatures[model] = face_of(model.config, model.spec)
    face = _signatures[model]
    return None if face is None else TensorText(model, face)


class TensorText:
    """Asks the model through `face`, with the language model's other inputs as request parameters."""

    is_measured = True
    max_model_len = None
    max_beam_width = 1
    parent = None
    failure = None

    def __init__(self, model: Model, face: TensorFace) -> None:
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
