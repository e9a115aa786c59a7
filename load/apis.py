"""The protocols a run can speak: the body each wants and what each of its events says."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from load.config import Api, Workload

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event says."""

    has_text: bool = False
    """Whether it is a token event: one that brings text. A role, a finish reason or usage alone is none."""
    num_tokens: int | None = None
    """Tokens of this event alone, where the server says so."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Tokens of the whole stream so far, where the server says so."""
    finish_reason: str | None = None
    error: str | None = None


class Dialect(Protocol):
    """One protocol. `ends_with_done`: a clean stream's last event is `[DONE]`."""

    ends_with_done: bool

    def path(self, model: str) -> str: ...

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes: ...

    def read(self, data: bytes) -> Piece:
        """Raises `ValueError` where the event is not this protocol's JSON."""
        ...


def dialect_of(api: Api) -> Dialect:
    """The protocol's one implementation."""
    dialects: dict[Api, type[Dialect]] = {
        Api.CHAT: ChatDialect,
        Api.COMPLETIONS: CompletionsDialect,
        Api.GENERATE_STREAM: GenerateDialect,
    }
    return dialects[api]()


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
_TOKEN = Piece(has_text=True)
"""What nearly every event says."""


def _message_of(error: object) -> str:
    """The readable part of an `error` member: OpenAI's is an object, Triton's a string."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _openai_body(model: str, subject: dict[str, Any], max_tokens: int, workload: Workload) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        **subject,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | workload.extra_body)


def _read_chunk(chunk: _Chunk, choice: _Choice, text: str | None) -> Piece:
    if text and choice.finish_reason is None and chunk.usage is None and chunk.error is None:
        return _TOKEN
    usage = chunk.usage or _Usage()
    return Piece(
        has_text=bool(text),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reason=choice.finish_reason,
        error=None if chunk.error is None else _message_of(chunk.error),
    )


class CompletionsDialect:
    """`POST /v1/completions`: a prompt of token ids is exact and needs no tokenizer."""

    ends_with_done = True

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def path(self, model: str) -> str:
        return "/v1/completions"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        return _openai_body(model, {"prompt": prompt}, max_tokens, workload)

    def read(self, data: bytes) -> Piece:
        chunk = self._decode(data)
        choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
        return _read_chunk(chunk, choice, choice.text)


class ChatDialect:
    """`POST /v1/chat/completions`: one user message; the server's template adds its own tokens."""

    ends_with_done = True

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def path(self, model: str) -> str:
        return "/v1/chat/completions"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        return _openai_body(model, {"messages": [{"role": "user", "content": prompt}]}, max_tokens, workload)

    def read(self, data: bytes) -> Piece:
        chunk = self._decode(data)
        choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
        delta = choice.delta or _NO_DELTA
        return _read_chunk(chunk, choice, delta.content or delta.reasoning_content or delta.reasoning)


class GenerateDialect:
    """Triton's `POST /v2/models/{model}/generate_stream`: no terminator, the HTTP body's end is the stream's."""

    ends_with_done = False

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_GenerateEvent).decode

    def path(self, model: str) -> str:
        return f"/v2/models/{model}/generate_stream"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        body: dict[str, Any] = {
            "text_input": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "return_num_output_tokens": True,
        }
        if workload.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | workload.extra_body)

    def read(self, data: bytes) -> Piece:
        event = self._decode(data)
        return Piece(
            has_text=bool(event.text_output),
            num_tokens=event.num_output_tokens,
            finish_reason=event.finish_reason,
            error=None if event.error is None else _message_of(event.error),
        )
