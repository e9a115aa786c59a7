"""Answers as JSON or as server-sent events: sources, token, citations, usage, error."""

from typing import Any

import orjson

from sluice.engine.client.stream import Consumer
from sluice.errors import SluiceError
from sluice.gateway.api.rag.bodies import JsonObject
from sluice.gateway.front.http.errors import client_names, openai_error_body
from sluice.gateway.front.http.sse import DONE, encode_text
from sluice.pipelines.text.citations import encoding_field, to_json_objects
from sluice.pipelines.text.stream import Called, Generate, Mapped
from sluice.pipelines.text.types import Retrieval, TextEvent

_PARAM_NAMES = {"query": "question"}
"""The client's name of a pipeline's input."""


async def stream_answer(generate: Generate, head: JsonObject, consumer: Consumer[bytes]) -> None:
    """Push the event `sources`, a `token` for each text, then `citations`, `usage` and [DONE].

    `head` has the fields that identify the answer.
    """
    is_first = True

    def frame(event: TextEvent) -> bytes:
        nonlocal is_first
        found = _retrieval(event)
        frame = encode_event(b"sources", {**head, **_sources(found)}) if is_first else b""
        is_first = False
        if event.text:
            frame += encode_token(event.text)
        if event.finish_reason is not None:
            frame += encode_event(b"citations", _citations(found)) + encode_event(b"usage", _ending(event)) + DONE
        return frame

    with client_names(_PARAM_NAMES):
        await generate(Mapped(frame, consumer))


async def collect_answer(generate: Generate, head: JsonObject) -> JsonObject:
    events: list[TextEvent] = []
    with client_names(_PARAM_NAMES):
        await generate(Called(events.append))
    found, text = _retrieval(events[-1]), "".join([event.text for event in events])
    return {**head, "answer": text, **_sources(found), **_citations(found), **_ending(events[-1])}


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
