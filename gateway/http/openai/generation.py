"""From a request's job to its HTTP answer, streamed or whole."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request, Response

from gateway.http.disconnect import run_while_connected
from gateway.http.openai.job import Job
from gateway.http.openai.merge import IndexedEvents, merged
from gateway.http.openai.reply import Choice, Reply, error_frame
from gateway.http.request_id import request_id_of
from gateway.http.sse import EventStreamResponse
from gateway.service import InferenceService
from pipelines.text.types import TextEvent


async def answer(service: InferenceService, request: Request, job: Job, headers: dict[str, str]) -> Response:
    """Generate what `job` asks for. The request's body must have been read.

    Raises SluiceError for what is refused or fails before the first byte of the answer.
    """
    model = service.model(job.fields.model)
    request_id = request_id_of(request)
    reply = _reply(job, model.name, request_id)
    text_requests = job.text_requests(request_id)
    events = merged([service.generate(model, one, job.reply.protocol) for one in text_requests])
    if job.fields.stream:
        return EventStreamResponse(stream_frames(events, reply), error_frame, headers)
    choices = await run_while_connected(request.receive, whole_choices(events, len(text_requests)))
    return Response(reply.whole(choices), headers=headers, media_type="application/json")


def _reply(job: Job, model: str, request_id: str) -> Reply:
    options = job.fields.stream_options
    return job.reply(
        reply_id=f"{job.reply.id_prefix}-{request_id}",
        created=int(time.time()),
        model=model,
        num_choices=len(job.prompts),
        include_usage=options is not None and bool(options.include_usage),
    )


async def stream_frames(events: IndexedEvents, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. What comes before the first text goes out with it."""
    ends = []
    opening = reply.opening()
    async with aclosing(events):
        async for index, event in events:
            yield opening + reply.frame(index, event)
            opening = b""
            if event.finish_reason is not None:
                ends.append(event)
    yield reply.closing(ends)


async def whole_choices(events: IndexedEvents, num_choices: int) -> list[Choice]:
    """Every choice, complete, in the order of the prompts."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    ends: dict[int, TextEvent] = {}
    async with aclosing(events):
        async for index, event in events:
            texts[index].append(event.text)
            ends[index] = event
    return [Choice("".join(pieces), ends[index]) for index, pieces in enumerate(texts)]
