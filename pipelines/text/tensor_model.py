"""Any served model as a text model, called through its tensors of texts: an ensemble that answers questions, a hosted
LLM."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.client.stream import Consumer
from sluice.engine.types import FinishReason
from sluice.engine.validation import check_sampling
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.text.citations import EncodingProgress, Source, cite, decode_progress, decode_source
from sluice.pipelines.text.model import (
    TextModel,
    fingerprint_of,
    leave_out_images,
    refuse_images,
    refuse_parameters,
    text_model_of,
)
from sluice.pipelines.text.sampling import SamplingDefaults, build_request_parameters, default_max_tokens, not_passed_on
from sluice.pipelines.text.stream import Expanded, sent_prompt
from sluice.pipelines.text.types import (
    AS_IT_IS,
    ChatMessage,
    Conversation,
    Prompt,
    PromptForm,
    Retrieval,
    TemplateOptions,
    TextDetail,
    TextEvent,
    TextRequest,
)
from sluice.serving.model import Model, ResponseStream
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Tensor

MAX_MESSAGES = 10_000
"""Most messages of a conversation. Making more of them holds up the event loop."""
MESSAGES = "messages"
"""An input of this name takes a whole conversation, as JSON (`pipelines/text/tensor_model.py`)."""
INPUTS = (MESSAGES, "query", "question", "text_input")
"""Names of inputs that take the user's text, in order of preference."""
OUTPUTS = ("response", "answer", "text_output")
"""Names of outputs that give the answer, in order of preference."""
INPUT_KEY, OUTPUT_KEY = "chat_input", "chat_output"
"""Parameters of config.pbtxt that name the input and the output where they have other names."""

HISTORY = "history"
"""The request parameter with the turns before the question, as JSON."""
_ENSEMBLE = "ensemble"
_US_PER_S = 1_000_000
_ANY_LENGTH = 2**31 - 1
"""Stands for `max_tokens` where a request leaves it out, when other fields are checked."""

SOURCES, DROPPED = "sources", "dropped"
"""Outputs with what was retrieved: a source as JSON in each element, "" in surplus elements."""
ENCODING = "encoding"
"""An output with the progress of encoding as JSON, "" while no documents are being encoded."""
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, NUM_CACHED_TOKENS = "num_input_tokens", "num_output_tokens", "num_cached_tokens"
_COUNTS = (NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, NUM_CACHED_TOKENS)
SIDE_OUTPUTS = frozenset({SOURCES, DROPPED, ENCODING, FINISH_REASON, *_COUNTS})
"""Outputs that are read besides the text."""


def read_text_rows(request: InferRequest, name: str, *, is_batched: bool) -> list[list[str]]:
    """Return each row's texts in the input `name`; without a batch dimension one row. Raises INVALID without UTF-8."""
    array = request.inputs[name].array
    rows = array.reshape(array.shape[0], -1) if is_batched else array.reshape(1, -1)
    try:
        return [[element.decode() for element in row] for row in rows.tolist()]
    except UnicodeDecodeError:
        raise invalid(name, f"input '{name}' must be text in UTF-8") from None


def build_text_tensor(name: str, rows: Sequence[Sequence[bytes]], *, is_batched: bool) -> Tensor:
    """Build a tensor [rows, longest row], padded with empty elements, or [elements] without a batch dimension."""
    width = max(map(len, rows))
    array = np.full((len(rows), width), b"", np.object_)
    for padded, row in zip(array, rows, strict=True):
        padded[: len(row)] = row
    return Tensor.of(name, array if is_batched else array.reshape(width))


class _TextPart(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str


class _Turn(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_TextPart]

    def message(self) -> ChatMessage:
        if isinstance(self.content, str):
            return ChatMessage(self.role, self.content)
        return ChatMessage(self.role, "".join(part.text for part in self.content))


_DECODER = msgspec.json.Decoder(list[_Turn])
_ENCODER = msgspec.json.Encoder()


def decode_messages(text: str, param: str = "messages") -> tuple[ChatMessage, ...]:
    """Decode a JSON array of messages. Roles are not checked. Raises SluiceError INVALID, naming `param`."""
    try:
        turns = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        form = '[{"role": "user", "content": "..."}, ...]'
        raise invalid(param, f"{param} must be a JSON array of messages, {form}: {error}") from None
    if len(turns) > MAX_MESSAGES:
        raise invalid(param, f"{param} must have at most {MAX_MESSAGES} messages, got {len(turns)}")
    return tuple([turn.message() for turn in turns])


def encode_messages(messages: Sequence[ChatMessage]) -> bytes:
    """Encode messages as a JSON array, for an element of a tensor or a request parameter."""
    return _ENCODER.encode(messages)


@dataclass(frozen=True, slots=True)
class TextSignature:
    """The input and the output of a model that carry a conversation."""

    input: TensorSpec
    output: TensorSpec

    @property
    def takes_messages(self) -> bool:
        """Whether the input is a whole conversation rather than one question."""
        return self.input.name == MESSAGES


def find_text_signature(config: ModelConfig, spec: ModelSpec) -> TextSignature | None:
    """Return the text signature of a model that needs no other input than one text; None for any other model. Raises
    INVALID where a parameter of the configuration names a tensor that cannot carry text."""
    input = _find_tensor(config, INPUT_KEY, INPUTS, spec.inputs)
    output = _find_tensor(config, OUTPUT_KEY, OUTPUTS, spec.outputs)
    if input is None or output is None:
        return None
    needed = {name for name, each in spec.inputs.items() if not each.is_optional}
    return TextSignature(input, output) if needed <= {input.name} else None


def _find_tensor(
    config: ModelConfig, key: str, usual: Iterable[str], tensors: Mapping[str, TensorSpec]
) -> TensorSpec | None:
    """Return the tensor that parameter `key` names, else the first of the `usual` ones that carries text."""
    named = config.parameters[key].string_value if key in config.parameters else ""
    if named and not _is_text(tensors.get(named)):
        what = f"names '{named}', which is no BYTES tensor of one element that the model declares"
        raise invalid(key, f"parameter '{key}' of model '{config.name}' {what}")
    names = (named,) if named else usual
    return next((tensors[name] for name in names if _is_text(tensors.get(name))), None)


def _is_text(tensor: TensorSpec | None) -> bool:
    return tensor is not None and tensor.data_type is BYTES and tensor.dims in ((1,), (-1,))


_DEFAULT_OPTIONS = TemplateOptions()
_TEMPLATE_PARAMS = {
    "tools": "tools",
    "documents": "documents",
    "template": "chat_template",
    "continues_final_message": "continue_final_message",
    "adds_generation_prompt": "add_generation_prompt",
}
"""Clients' names of options of a chat template."""
_TOOL_ROLES = ("tool", "function")

_signatures: WeakKeyDictionary[Model, TextSignature | None] = WeakKeyDictionary()
"""Signatures by model. Reading a configuration is slow, and every request to an OpenAI route looks at every model."""


@text_model_of.register
def _(model: Model) -> TextModel | None:
    """Return a text model over the tensors of a model that is not an LLM, as far as `find_text_signature` finds any."""
    if model not in _signatures:
        _signatures[model] = find_text_signature(model.config, model.spec)
    signature = _signatures[model]
    return None if signature is None else TensorText(model, signature)


class TensorText:
    """Calls a model with the tensors of its text signature and the sampling fields as request parameters."""

    max_model_len = None
    max_beam_width = 1
    max_images = 0
    parent = None
    failure = None
    template_names: frozenset[str] = frozenset()

    def __init__(self, model: Model, signature: TextSignature) -> None:
        self.model = model
        self._signature = signature
        self.name = model.name
        self.version = str(model.version)
        self.created = model.created
        """When the model was loaded, in seconds since 1970."""

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.name, self.version)

    @property
    def takes_parameters(self) -> bool:
        """Whether the model may retrieve, and so read `parameters`: it is an ensemble, or it gives sources."""
        spec = self.model.spec
        return spec.platform == _ENSEMBLE or SOURCES in spec.outputs

    def adapt(self, conversation: Conversation) -> Conversation:
        return leave_out_images(conversation, f": model '{self.name}' takes text alone")

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> Prompt:
        """Return the prompt unchanged: the model tokenizes it."""
        return prompt

    def chat_reader(self, request: TextRequest) -> None:
        """Return None: the answer is text alone. Raises INVALID for a conversation with tools."""
        prompt = sent_prompt(request.prompt)
        if isinstance(prompt, Conversation) and prompt.options.tools:
            reason = "is called with tensors, which have no place for tools; leave them out, or name a language model"
            raise invalid("tools", f"model '{self.name}' {reason}")

    async def generate(self, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        """Generate text as `TextModel.generate` does. Raises INVALID, by name, for fields that tensors cannot carry."""
        with default_max_tokens(request):
            if not self.takes_parameters:
                refuse_parameters(self.name, request)
            # The language model would only refuse fields out of range with the sources already sent.
            max_tokens = request.sampling.get("max_tokens", request.default_max_tokens) or _ANY_LENGTH
            check_sampling(SamplingDefaults().resolve(request.sampling, max_tokens))
            stream = TensorTextStream(self.name, self._signature.output.name)
            await ResponseStream(self.model, self._infer_request(request)).pass_to(Expanded(stream.feed, consumer))

    def _infer_request(self, request: TextRequest) -> InferRequest:
        text, history = self._split_prompt(request.prompt)
        parameters = {**build_request_parameters(request, self.name), **request.parameters}
        if history:
            parameters[HISTORY] = encode_messages(history).decode()
        if self.model.spec.is_decoupled:
            parameters["stream"] = True
        shape = (1, 1) if self.model.spec.max_batch_size > 0 else (1,)
        name = self._signature.input.name
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
            session=request.session,
            parent_session=request.parent_session,
        )

    def _outputs(self) -> tuple[str, ...]:
        """Return the outputs that make the answer, so that steps for other outputs do not run."""
        return tuple(
            name for name in self.model.spec.outputs if name == self._signature.output.name or name in SIDE_OUTPUTS
        )

    def _refuse_options(self, options: TemplateOptions) -> None:
        """Raise INVALID for options of a chat template, which the model renders itself. Arguments of a template may
        have no effect, and have none."""
        for name, param in _TEMPLATE_PARAMS.items():
            if getattr(options, name) != getattr(_DEFAULT_OPTIONS, name):
                raise not_passed_on(param, self.name)

    def _split_prompt(self, prompt: Prompt) -> tuple[bytes, Sequence[ChatMessage]]:
        """Return the element of the input, and the earlier turns that it does not contain."""
        prompt = sent_prompt(prompt)
        if isinstance(prompt, list):
            raise invalid("prompt", f"model '{self.name}' takes text, not token ids")
        if isinstance(prompt, str):
            prompt = Conversation((ChatMessage("user", prompt),))
        self._refuse_options(prompt.options)
        if any(each.parts for each in prompt.messages):
            refuse_images(prompt, f": model '{self.name}' takes text alone")
        if any(each.tool_calls or each.role in _TOOL_ROLES for each in prompt.messages):
            raise invalid("messages", f"model '{self.name}' takes no tool calls and no results of them")
        if self._signature.takes_messages:
            return encode_messages(prompt.messages), ()
        *history, question = prompt.messages
        if question.role != "user":
            message = f"model '{self.name}' answers a question, so the last message must be the user's"
            raise invalid("messages", f"{message}, got the role {question.role!r}")
        return question.content.encode(), history


def _microseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, round(seconds * _US_PER_S))


class TensorTextStream:
    """Makes the text events of one request out of its responses, in order."""

    def __init__(self, model: str, output: str) -> None:
        """Take the name of the model, and of the output with the text."""
        self._model = model
        self._output = output
        self._texts: list[str] = []
        self._retrieval: Retrieval | None = None
        self._finish_reason = FinishReason.STOP
        self._counts = dict.fromkeys(_COUNTS, 0)

    def feed(self, response: InferResponse) -> Iterator[TextEvent]:
        """Yield the events of one response. Raises its error, and INTERNAL for an element that is not a source."""
        if response.error is not None:
            raise response.error
        tensors = {tensor.name: tensor for tensor in response.outputs}
        if self._note_retrieval(tensors):
            yield _event("", TextDetail(retrieval=self._retrieval))
        self._note_end(tensors)
        text = "".join(_texts(tensors.get(self._output)))
        if text:
            self._texts.append(text)
        if response.is_final:
            yield self._last(text)
        elif text:
            yield _event(text)

    def _note_retrieval(self, tensors: dict[str, Tensor]) -> bool:
        """Keep what the response says of the retrieval; return whether it says anything."""
        if tensors.keys().isdisjoint((SOURCES, DROPPED, ENCODING)):
            return False
        before = self._retrieval or Retrieval()
        self._retrieval = Retrieval(
            sources=self._sources(tensors[SOURCES]) if SOURCES in tensors else before.sources,
            dropped=self._sources(tensors[DROPPED]) if DROPPED in tensors else before.dropped,
            encoding=self._progress(tensors[ENCODING]) if ENCODING in tensors else before.encoding,
        )
        return True

    def _progress(self, tensor: Tensor) -> EncodingProgress | None:
        try:
            return decode_progress(b"".join(tensor.array.ravel()))
        except msgspec.DecodeError as error:
            message = f"model '{self._model}' gave an output '{tensor.name}' that is no progress of encoding: {error}"
            raise SluiceError(ErrorCode.INTERNAL, message) from None

    def _sources(self, tensor: Tensor) -> tuple[Source, ...]:
        try:
            return tuple(decode_source(element) for element in tensor.array.ravel() if element)
        except msgspec.DecodeError as error:
            message = f"model '{self._model}' gave an element of '{tensor.name}' that is no source: {error}"
            raise SluiceError(ErrorCode.INTERNAL, message) from None

    def _note_end(self, tensors: dict[str, Tensor]) -> None:
        for name in _COUNTS:
            if name in tensors:
                self._counts[name] = int(tensors[name].array.flat[0])
        reason = "".join(_texts(tensors.get(FINISH_REASON)))
        if reason:
            self._finish_reason = FinishReason.LENGTH if reason == FinishReason.LENGTH else FinishReason.STOP

    def _last(self, text: str) -> TextEvent:
        counts, detail = self._counts, None
        if self._retrieval is not None:
            citations = cite("".join(self._texts), self._retrieval.sources)
            detail = TextDetail(retrieval=msgspec.structs.replace(self._retrieval, citations=tuple(citations)))
        return TextEvent(
            text=text,
            num_tokens=counts[NUM_OUTPUT_TOKENS],
            prompt_tokens=counts[NUM_INPUT_TOKENS],
            completion_tokens=counts[NUM_OUTPUT_TOKENS],
            finish_reason=self._finish_reason,
            cached_tokens=counts[NUM_CACHED_TOKENS],
            detail=detail,
        )


def _event(text: str, detail: TextDetail | None = None) -> TextEvent:
    return TextEvent(text=text, num_tokens=0, prompt_tokens=0, completion_tokens=0, detail=detail)


def _texts(tensor: Tensor | None) -> Iterator[str]:
    if tensor is not None:
        for element in tensor.array.ravel():
            yield element.decode(errors="replace")
