"""OpenAI's APIs: completions, chats and responses, which stream; embeddings and rerank, which do not."""

from typing import Any, ClassVar

import msgspec

from load.apis.base import TOKEN, Api, Framing, ParsedEvent, Prompt, encode_body, error_message, sampling
from load.config import Workload


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
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_NO_DELTA = _Delta()
_NO_CHOICE = _Choice()


class CompletionsApi(Api):
    """`POST /v1/completions`. A prompt of token ids has an exact length and needs no tokenizer."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def path(self, model: str) -> str:
        return "/v1/completions"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        return encode_body(self._asking(prompt) | _streamed(model, max_tokens, workload), workload)

    def parse(self, data: bytes) -> ParsedEvent:
        chunk = self._decode(data)
        choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
        text = self._text(choice)
        if text and choice.finish_reason is None and chunk.usage is None and chunk.error is None:
            return TOKEN
        usage = chunk.usage or _Usage()
        return ParsedEvent(
            has_text=bool(text),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=choice.finish_reason,
            error=None if chunk.error is None else error_message(chunk.error),
        )

    def _asking(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt": prompt}

    def _text(self, choice: _Choice) -> str | None:
        return choice.text


class ChatApi(CompletionsApi):
    """`POST /v1/chat/completions` with one user message. The server's chat template adds its own tokens."""

    def path(self, model: str) -> str:
        return "/v1/chat/completions"

    def _asking(self, prompt: Prompt) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}]}

    def _text(self, choice: _Choice) -> str | None:
        delta = choice.delta or _NO_DELTA
        return delta.content or delta.reasoning_content or delta.reasoning


def _streamed(model: str, max_tokens: int, workload: Workload) -> dict[str, Any]:
    length = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **length, **sampling(workload)}


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    error: Any = None
    incomplete_details: _Incomplete | None = None


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    delta: Any = None
    response: _Response | None = None
    message: str | None = None
    """Of an event of the type `error`."""


class ResponsesApi(Api):
    """`POST /v1/responses` with one input text. The stream ends with `response.completed` or a like event."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_ResponseEvent).decode

    def path(self, model: str) -> str:
        return "/v1/responses"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        length = {"max_output_tokens": max_tokens, "stream": True, "store": False}
        return encode_body({"model": model, "input": prompt, **length, **sampling(workload)}, workload)

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        if event.type.endswith((".output_text.delta", ".reasoning_text.delta")):
            return TOKEN if event.delta else ParsedEvent()
        if event.type == "error":
            return ParsedEvent(error=event.message or "error", is_last=True)
        if event.type not in _RESPONSE_ENDS:
            return ParsedEvent()
        return _response_end(event.response or _Response(), event.type)


_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")


def _response_end(response: _Response, kind: str) -> ParsedEvent:
    usage = response.usage or _Usage()
    error = error_message(response.error or "failed") if kind == "response.failed" else None
    is_cut = kind == "response.incomplete"
    return ParsedEvent(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        finish_reason="length" if is_cut else "stop",
        error=error,
        is_last=True,
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

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_WholeAnswer).decode

    def path(self, model: str) -> str:
        return "/v1/embeddings"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        return encode_body({"model": model, "input": prompt}, workload)

    def parse(self, data: bytes) -> ParsedEvent:
        answer = self._decode(data)
        if not answer.data and not answer.results:
            return ParsedEvent(error=f"an answer without results: {data[:200]!r}")
        return ParsedEvent(prompt_tokens=(answer.usage or _Usage()).prompt_tokens)


class RerankApi(EmbeddingsApi):
    """`POST /v1/rerank` of a prompt's first quarter as the query and its quarters as the documents."""

    def path(self, model: str) -> str:
        return "/v1/rerank"

    def body(self, model: str, prompt: Prompt, max_tokens: int, workload: Workload) -> bytes:
        words = str(prompt).split()
        size = max(1, len(words) // 4)
        documents = [" ".join(words[start : start + size]) for start in range(0, len(words), size)]
        return encode_body({"model": model, "query": documents[0], "documents": documents}, workload)
