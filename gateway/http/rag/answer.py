"""From what a pipeline generates to an HTTP answer, streamed or whole."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from gateway.http.rag.frames import named_frame, token_frame
from gateway.http.rag.objects import JsonObject
from gateway.http.sse import DONE
from pipelines.text.sources import as_objects
from pipelines.text.types import Retrieval, TextEvent

Events = AsyncGenerator[TextEvent, None]
NOTHING = Retrieval()


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer says of itself."""

    id: str
    model: str
    collection: str

    def as_object(self) -> JsonObject:
        return {"id": self.id, "object": "rag.answer", "model": self.model, "collection": self.collection}


async def answer_frames(events: Events, head: AnswerHead) -> AsyncGenerator[bytes, None]:
    """`sources` before the first text, a `token` for each text, then `citations`, `usage` and [DONE]."""
    told_sources = False
    async with aclosing(events):
        async for event in events:
            found = _retrieval(event)
            if not told_sources:
                told_sources = True
                yield named_frame(b"sources", {**head.as_object(), **_sources(found)})
            if event.text:
                yield token_frame(event.text)
            if event.finish_reason is not None:
                yield _closing(event, found)


async def whole_answer(events: Events, head: AnswerHead) -> JsonObject:
    """The answer as one object."""
    texts: list[str] = []
    async with aclosing(events):
        async for event in events:
            texts.append(event.text)
            last = event
    found = _retrieval(last)
    return {**head.as_object(), "answer": "".join(texts), **_sources(found), **_citations(found), **_ending(last)}


def _closing(last: TextEvent, found: Retrieval) -> bytes:
    return named_frame(b"citations", _citations(found)) + named_frame(b"usage", _ending(last)) + DONE


def _retrieval(event: TextEvent) -> Retrieval:
    found = event.detail.retrieval if event.detail is not None else None
    return NOTHING if found is None else found


def _sources(found: Retrieval) -> JsonObject:
    return {"sources": as_objects(found.sources), "dropped": as_objects(found.dropped)}


def _citations(found: Retrieval) -> JsonObject:
    return {"citations": as_objects(found.citations)}


def _ending(last: TextEvent) -> JsonObject:
    """The token counts are OpenAI's; 0 where the pipeline's model does not count."""
    return {
        "finish_reason": last.finish_reason,
        "usage": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": last.prompt_tokens + last.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        },
    }
