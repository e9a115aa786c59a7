"""Ollama's chats."""

from typing import ClassVar

import msgspec

from load.apis.base import TOKEN, Api, Framing, ParsedEvent, Prompt, encode_body, sampling
from load.config import Workload


class _Message(msgspec.Struct):
    content: str = ""
    thinking: str | None = None


class _Line(msgspec.Struct):
    message: _Message | None = None
    done: bool = False
    done_reason: str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: str | None = None


class OllamaChatApi(Api):
    """`POST /api/chat` with one user message. Events are lines of JSON; the last says `done`."""

    framing: ClassVar = Framing.JSON_LINES

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode

    def path(self, model: str) -> str:
        return "/api/chat"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        options = {"num_predict": max_tokens, **sampling(workload)}
        messages = [{"role": "user", "content": prompt}]
        return encode_body({"model": model, "messages": messages, "stream": True, "options": options}, workload)

    def parse(self, data: bytes) -> ParsedEvent:
        line = self._decode(data)
        has_text = line.message is not None and bool(line.message.content or line.message.thinking)
        if has_text and not line.done and line.error is None:
            return TOKEN
        return ParsedEvent(
            has_text=has_text,
            prompt_tokens=line.prompt_eval_count,
            completion_tokens=line.eval_count,
            finish_reason=line.done_reason,
            error=line.error,
            is_last=line.done,
        )
