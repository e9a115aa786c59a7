"""OpenAI's completions and chats, which stream, and its embeddings and rerank, which do not."""

from typing import Any, ClassVar

import msgspec

from sluice.load.apis.base import (
    TOKEN,
    Api,
    AskedRequest,
    CallPart,
    Extra,
    Framing,
    ParsedEvent,
    content_parts,
    conversation,
    error_message,
)
from sluice.load.config import ToolUse


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True):
    index: int = 0
    function: _Function = _Function()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


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


_NO_DELTA = _Delta()
_NO_CHOICE = _Choice()


class CompletionsApi(Api):
    """`POST /v1/completions`. A prompt of token ids has an exact length and needs no tokenizer."""

    route: ClassVar = "/v1/completions"
    event: ClassVar = _Chunk

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        length = {"max_tokens": asked.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        return self._asking(asked) | {"model": asked.model, **length, **asked.sampling}

    def parse(self, data: bytes) -> ParsedEvent:
        chunk = self._decode(data)
        choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
        has_text = self._has_text(choice)
        is_plain = choice.finish_reason is None and chunk.usage is None and chunk.error is None
        if has_text and is_plain and not self.keeps_answers:
            return TOKEN
        usage = chunk.usage or _Usage()
        delta = choice.delta or _NO_DELTA
        return ParsedEvent(
            has_text=has_text,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=choice.finish_reason,
            error=None if chunk.error is None else error_message(chunk.error),
            text=delta.content if self.keeps_answers else None,
            calls=_call_parts(delta) if self.keeps_answers else (),
        )

    def _asking(self, asked: AskedRequest) -> dict[str, Any]:
        return {"prompt": asked.prompt}

    def _has_text(self, choice: _Choice) -> bool:
        return bool(choice.text)


class ChatApi(CompletionsApi):
    """`POST /v1/chat/completions`. The server's chat template adds its own tokens."""

    route: ClassVar = "/v1/chat/completions"
    takes: ClassVar = frozenset(Extra)

    def _asking(self, asked: AskedRequest) -> dict[str, Any]:
        workload = asked.workload
        fields: dict[str, Any] = {"messages": conversation(asked.prompt, asked.context, _content)}
        if workload.tool_use is not None:
            fields |= chat_tools(workload.tool_use)
        if workload.json_schema is not None:
            schema = {"name": "answer", "schema": workload.json_schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _has_text(self, choice: _Choice) -> bool:
        delta = choice.delta or _NO_DELTA
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def _picture(image: str) -> Any:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}


_content = content_parts(_picture)


def chat_tools(use: ToolUse) -> dict[str, Any]:
    """Return the fields of tools as chats have them."""
    choice: Any = use.choice
    if use.names_tool:
        choice = {"type": "function", "function": {"name": use.choice}}
    return {"tools": [{"type": "function", "function": each} for each in use.functions], "tool_choice": choice}


def _call_parts(delta: _Delta) -> tuple[CallPart, ...]:
    return tuple(
        CallPart(each.index, each.function.name, each.function.arguments or "") for each in delta.tool_calls or ()
    )


class _WholeAnswer(msgspec.Struct):
    data: list[Any] = []
    results: list[Any] = []
    usage: _Usage | None = None


class EmbeddingsApi(Api):
    """`POST /v1/embeddings` of one text, or of one prompt of token ids."""

    framing: ClassVar = Framing.WHOLE
    has_terminator: ClassVar = False
    has_output_tokens: ClassVar = False

    route: ClassVar = "/v1/embeddings"
    event: ClassVar = _WholeAnswer

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        return {"model": asked.model, "input": asked.prompt}

    def parse(self, data: bytes) -> ParsedEvent:
        answer = self._decode(data)
        if not answer.data and not answer.results:
            return ParsedEvent(error=f"an answer without results: {data[:200]!r}")
        return ParsedEvent(prompt_tokens=(answer.usage or _Usage()).prompt_tokens)


class RerankApi(EmbeddingsApi):
    """`POST /v1/rerank` of a prompt's first quarter as the query and its quarters as the documents."""

    route: ClassVar = "/v1/rerank"

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        words = str(asked.prompt).split()
        size = max(1, len(words) // 4)
        documents = [" ".join(words[start : start + size]) for start in range(0, len(words), size)]
        return {"model": asked.model, "query": documents[0], "documents": documents}
