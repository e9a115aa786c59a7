"""Reads the texts of answers in each API, whole or streamed, and checks the shape of errors."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from sluice.load.apis import Api, Framing, ParsedEvent, make_api
from sluice.load.apis.base import AskedRequest, error_message
from sluice.load.config import ApiKind
from sluice.load.stream import StreamReader

_JSON = msgspec.json.Decoder()


class WholeApi(Api):
    """An API of streams, asked for a whole answer."""

    framing: ClassVar = Framing.WHOLE
    has_terminator: ClassVar = False

    def __init__(self, kind: ApiKind) -> None:
        self._inner = make_api(kind)

    def path(self, model: str) -> str:
        return self._inner.path(model)

    def headers(self) -> tuple[tuple[str, str], ...]:
        return self._inner.headers()

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        fields = self._inner.fields(asked) | {"stream": False}
        fields.pop("stream_options", None)
        return fields

    def parse(self, data: bytes) -> ParsedEvent:
        document = _JSON.decode(data)
        error = document.get("error")
        return ParsedEvent(
            completion_tokens=_output_tokens(document), error=None if error is None else error_message(error)
        )


def _output_tokens(document: dict[str, Any]) -> int | None:
    """Return the number of tokens of a whole answer, as its protocol counts them."""
    usage = document.get("usage") or {}
    counts = (usage.get("completion_tokens"), usage.get("output_tokens"), document.get("eval_count"))
    counted = next((each for each in counts if each is not None), None)
    return document.get("num_output_tokens") if counted is None else counted


@dataclass(slots=True)
class TextReader(StreamReader):
    """Reads a response and keeps its text."""

    texts: list[str] = field(default_factory=list)

    is_body: bool = False
    """Whether the response has a body; messages of gRPC bring their text themselves."""

    def _on_event(self, data: bytes, at: float) -> None:
        self.is_body = True
        self.texts.append(text_of(data))
        StreamReader._on_event(self, data, at)

    def take(self, event: ParsedEvent, at: float) -> None:
        if event.text is not None and not self.is_body:
            self.texts.append(event.text)
        StreamReader.take(self, event, at)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_begun(self) -> bool:
        """Whether an answer, or a part of one, has come."""
        return self.last_read_s > 0


def text_of(data: bytes) -> str:
    """Return the text of an event or of a whole answer, "" for one without; what is no JSON has none."""
    try:
        document = _JSON.decode(data)
    except msgspec.DecodeError:
        return _raw_tensors(data)
    return "".join(_texts(document)) if isinstance(document, dict) else ""


def _raw_tensors(data: bytes) -> str:
    """Return the bytes behind the JSON of an answer of binary tensors."""
    end = data.rfind(b"}")
    return data[end + 1 :].decode("latin-1") if end >= 0 else ""


def _texts(document: dict[str, Any]) -> list[str]:
    """Return the pieces of text of a document of any of the APIs."""
    kind = document.get("type")
    if kind == "response.output_text.delta":
        return [document["delta"]]
    if kind == "content_block_delta":
        return [document["delta"].get("text") or ""]
    if kind == "message":
        return [part.get("text") or "" for part in document["content"]]
    if "choices" in document:
        return [_text_of_choice(each) for each in document["choices"]]
    if document.get("object") == "response":
        parts = (part for item in document["output"] for part in item.get("content") or ())
        return [part.get("text") or "" for part in parts]
    return _texts_of_others(document)


def _text_of_choice(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or choice
    return message.get("content") or message.get("text") or ""


def _texts_of_others(document: dict[str, Any]) -> list[str]:
    if "message" in document and isinstance(document["message"], dict):  # Ollama's
        return [document["message"].get("content") or ""]
    if "text_output" in document:
        return [document["text_output"]]
    if "outputs" in document:
        return [str(each.get("data")) for each in document["outputs"]]
    if "data" in document:  # embeddings, whose last digits depend on the batch
        return [f"{len(each['embedding'])} numbers" for each in document["data"]]
    return []


def find_misshape(kind: ApiKind, status: int, body: str) -> str | None:
    """Describe how an error's answer breaks its protocol's shape; None if it does not."""
    try:
        document = _JSON.decode(body.encode())
    except msgspec.DecodeError:
        return f"status {status} with a body that is no JSON: {body[:200]!r}"
    error = document.get("error") if isinstance(document, dict) else None
    expects_object = kind not in _ERRORS_ARE_TEXTS
    is_shaped = isinstance(error, dict) and bool(error.get("message")) if expects_object else isinstance(error, str)
    if kind is ApiKind.MESSAGES:
        is_shaped = is_shaped and document.get("type") == "error"
    return None if is_shaped else f"status {status} in another shape than the protocol's: {body[:200]!r}"


_ERRORS_ARE_TEXTS = {ApiKind.OLLAMA_CHAT, ApiKind.GENERATE, ApiKind.GENERATE_STREAM}
_ERRORS_ARE_TEXTS |= {ApiKind.INFER, ApiKind.INFER_BINARY}
