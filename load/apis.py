"""The streaming APIs that a run can call: the body of a request, and the parsing of an event."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from load.config import ApiKind, Workload

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class ParsedEvent:
    """The content of one event."""

    has_text: bool = False
    """Whether it is a token event, one with text. A role, a finish reason or usage alone is no token event."""
    num_tokens: int | None = None
    """Tokens of this event alone, where the server counts them."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Tokens of the whole stream so far, where the server counts them."""
    finish_reason: str | None = None
    error: str | None = None


class StreamingApi(ABC):
    """One API. Where `ends_with_done`, the last event of a complete stream is `[DONE]`."""

    ends_with_done = True

    @abstractmethod
    def path(self, model: str) -> str: ...

    @abstractmethod
    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes: ...

    @abstractmethod
    def parse(self, data: bytes) -> ParsedEvent:
        """Parse an event's data. Raises `ValueError` where it is not this API's JSON."""


def make_api(kind: ApiKind) -> StreamingApi:
    apis: dict[ApiKind, type[StreamingApi]] = {
        ApiKind.CHAT: ChatApi,
        ApiKind.COMPLETIONS: CompletionsApi,
        ApiKind.GENERATE_STREAM: GenerateApi,
    }
    return apis[kind]()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _GenerateEvent(msgspec.Struct):
    text_output: str | list[str] | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    error: Any = None


_NO_DELTA = _Delta()
_NO_CHOICE = _Choice()
_TOKEN = ParsedEvent(has_text=True)
"""The content of nearly every event, made once."""


def _error_message(error: object) -> str:
    """Return the message of an `error` member: OpenAI's is an object, Triton's a string."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _encode_body(fields: dict[str, Any], max_tokens: int, workload: Workload) -> bytes:
    body = fields | {"max_tokens": max_tokens, "temperature": 0.0, "stream": True}
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | workload.extra_body)


class CompletionsApi(StreamingApi):
    """`POST /v1/completions`. A prompt of token ids has an exact length and needs no tokenizer."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def path(self, model: str) -> str:
        return "/v1/completions"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        fields = {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}}
        return _encode_body(fields, max_tokens, workload)

    def parse(self, data: bytes) -> ParsedEvent:
        chunk = self._decode(data)
        choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
        text = self._text(choice)
        if text and choice.finish_reason is None and chunk.usage is None and chunk.error is None:
            return _TOKEN
        usage = chunk.usage or _Usage()
        return ParsedEvent(
            has_text=bool(text),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=choice.finish_reason,
            error=None if chunk.error is None else _error_message(chunk.error),
        )

    def _text(self, choice: _Choice) -> str | None:
        return choice.text


class ChatApi(CompletionsApi):
    """`POST /v1/chat/completions` with one user message. The server's chat template adds its own tokens."""

    def path(self, model: str) -> str:
        return "/v1/chat/completions"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        messages = [{"role": "user", "content": prompt}]
        fields = {"model": model, "messages": messages, "stream_options": {"include_usage": True}}
        return _encode_body(fields, max_tokens, workload)

    def _text(self, choice: _Choice) -> str | None:
        delta = choice.delta or _NO_DELTA
        return delta.content or delta.reasoning_content or delta.reasoning


class GenerateApi(StreamingApi):
    """Triton's `POST /v2/models/{model}/generate_stream`. The stream has no terminator: it ends with the HTTP body."""

    ends_with_done = False

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_GenerateEvent).decode

    def path(self, model: str) -> str:
        return f"/v2/models/{model}/generate_stream"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        return _encode_body({"text_input": prompt, "return_num_output_tokens": True}, max_tokens, workload)

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        return ParsedEvent(
            has_text=bool(event.text_output),
            num_tokens=event.num_output_tokens,
            finish_reason=event.finish_reason,
            error=None if event.error is None else _error_message(event.error),
        )
