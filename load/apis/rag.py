"""Questions to documents: `POST /v1/rag/{collection}/query`."""

from typing import Any, ClassVar

import msgspec

from sluice.load.apis.base import TOKEN, Api, AskedRequest, Extra, Fetch, ParsedEvent, error_message
from sluice.load.config import Workload

DEFAULT_PIPELINE = "rag_pipeline"
"""The model that answers where none is named."""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    text: str | None = None
    sources: list[Any] | None = None
    usage: _Usage | None = None
    finish_reason: str | None = None
    error: Any = None


class RagApi(Api):
    """A question to a collection of documents. What was found comes before the first token.

    The model may end its answer where it likes: this API has no field that forbids it.
    """

    has_output_tokens: ClassVar = False
    takes: ClassVar = frozenset({Extra.TURNS})
    event: ClassVar = _Event

    def __init__(self) -> None:
        super().__init__()
        self._collection = ""

    async def prepare(self, fetch: Fetch, model: str, workload: Workload) -> None:
        self._collection = workload.collection

    def path(self, model: str) -> str:
        return f"/v1/rag/{self._collection}/query"

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": asked.model, "question": asked.prompt, "max_tokens": asked.max_tokens}
        said = [
            ({"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer})
            for turn in asked.context.history
        ]
        if said:
            fields["history"] = [message for pair in said for message in pair]
        return fields | {"stream": True, "temperature": 0.0}

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        if event.text and not self.keeps_answers:
            return TOKEN
        usage = event.usage or _Usage()
        return ParsedEvent(
            has_text=bool(event.text),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=event.finish_reason,
            error=None if event.error is None else error_message(event.error),
            text=event.text,
            has_sources=event.sources is not None,
        )
