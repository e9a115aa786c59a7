"""Answers as JSON or as server-sent events: sources, token, citations, usage, error."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from sluice.errors import SluiceError
from sluice.gateway.http.errors import client_names, openai_error_body
from sluice.gateway.http.rag.bodies import JsonObject
from sluice.gateway.http.sse import DONE, encode_text
from sluice.pipelines.text.citations import encoding_field, to_json_objects
from sluice.pipelines.text.types import Retrieval, TextEvent

Events = AsyncGenerator[TextEvent, None]
_PARAM_NAMES = {"query": "question"}
"""The client's name of a pipeline's input."""


async def stream_answer(events: Events, head: JsonObject) -> AsyncGenerator[bytes, None]:
    """Yield the event `sources`, a `token` for each text, then `citations`, `usage` and [DONE].

    `head` has the fields that identify the answer.
    """
    is_first = True
    with client_names(_PARAM_NAMES):
        async with aclosing(events):
            async for event in events:
                found = _retrieval(event)
                if is_first:
                    is_first = False
                    yield encode_event(b"sources", {**head, **_sources(found)})
                if event.text:
                    yield encode_token(event.text)
                if event.finish_reason is not None:
                    yield encode_event(b"citations", _citations(found)) + encode_event(b"usage", _ending(event)) + DONE


async def collect_answer(events: Events, head: JsonObject) -> JsonObject:
    texts: list[str] = []
    with client_names(_PARAM_NAMES):
        async with aclosing(events):
            async for event in events:
                texts.append(event.text)
                last = event
    found = _retrieval(last)
    return {**head, "answer": "".join(texts), **_sources(found), **_citations(found), **_ending(last)}


def _retrieval(event: TextEvent) -> Retrieval:
    found = event.detail.retrieval if event.detail is not None else None
    return Retrieval() if found is None else found


def _sources(found: Retrieval) -> JsonObject:
    sources, dropped = to_json_objects(found.sources), to_json_objects(found.dropped)
    return {"sources": sources, "dropped": dropped, **encoding_field(found.encoding)}


def _citations(found: Retrieval) -> JsonObject:
    return {"citations": to_json_objects(found.citations)}


def _ending(last: TextEvent) -> JsonObject:
    """Format finish reason and usage, with OpenAI's names. Counts are 0 if the pipeline's model does not count."""
    return {
        "finish_reason": last.finish_reason,
        "usage": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": last.prompt_tokens + last.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        },
    }


def encode_event(name: bytes, payload: Any) -> bytes:
    return b"event: " + name + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def encode_token(text: str) -> bytes:
    return b'event: token\ndata: {"text":' + encode_text(text) + b"}\n\n"


def encode_error(error: SluiceError) -> bytes:
    """Encode the last event of a stream that failed. No `[DONE]` follows it."""
    return b"event: error\ndata: " + openai_error_body(error) + b"\n\n"
