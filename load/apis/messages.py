"""Anthropic's messages."""

from typing import Any

import msgspec

from load.apis.base import TOKEN, Api, ParsedEvent, Prompt, encode_body, error_message, sampling
from load.config import Workload


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Delta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: Any = None


class MessagesApi(Api):
    """`POST /v1/messages` with one user message. The stream ends with `message_stop`."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Event).decode

    def path(self, model: str) -> str:
        return "/v1/messages"

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("anthropic-version", "2023-06-01"),)

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        messages = [{"role": "user", "content": prompt}]
        fields = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}
        return encode_body(fields | sampling(workload), workload)

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        match event.type:
            case "content_block_delta" if event.delta is not None and (event.delta.text or event.delta.thinking):
                return TOKEN
            case "message_start" if event.message is not None and event.message.usage is not None:
                return ParsedEvent(prompt_tokens=_prompt_tokens(event.message.usage))
            case "message_delta":
                usage, delta = event.usage or _Usage(), event.delta or _Delta()
                return ParsedEvent(completion_tokens=usage.output_tokens, finish_reason=delta.stop_reason)
            case "message_stop":
                return ParsedEvent(is_last=True)
            case "error":
                return ParsedEvent(error=error_message(event.error), is_last=True)
        return ParsedEvent()


def _prompt_tokens(usage: _Usage) -> int | None:
    """Return all tokens of the prompt: `input_tokens` leaves out those that a cache had."""
    if usage.input_tokens is None:
        return None
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
