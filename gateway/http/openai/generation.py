"""From a request's job to its HTTP answer, streamed or whole."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from fastapi import Request, Response

from gateway.http.disconnect import run_while_connected
from gateway.http.openai.job import Job
from gateway.http.openai.merge import IndexedEvents, merged
from gateway.http.openai.reply import Choice, Reply, error_frame
from gateway.http.openai.schemas import GenerationRequest
from gateway.http.request_id import request_id_of
from gateway.http.scheduling import Scheduling
from gateway.http.sse import EventStreamResponse
from gateway.service import InferenceService
from pipelines.llm.text_models import SEPARATOR
from pipelines.rag import owner_keys
from pipelines.text.types import Prompt, TextEvent
from sluice.errors import SluiceError

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.text.model import TextModel


async def answer(
    service: InferenceService, request: Request, job: Job, scheduling: Scheduling, headers: dict[str, str]
) -> Response:
    """Generate what `job` asks for. The request's body must have been read.

    Raises SluiceError for what is refused or fails before the first byte of the answer.
    """
    model = service.llm(_model_name(job.fields), scheduling.sticky_key)
    job.check_model(model)
    request_id = request_id_of(request)
    reply = _reply(job, model.name, request_id)
    # A language model alone has no collection to open.
    key = request.headers.get(owner_keys.HEADER, "") if model.takes_parameters else ""
    text_requests = job.text_requests(request_id, scheduling, await _prompts(model, job), key)
    events = merged([service.generate(model, one, job.reply.protocol) for one in text_requests])
    if job.fields.stream:
        return EventStreamResponse(stream_frames(events, reply, job), error_frame, headers)
    choices = await run_while_connected(request.receive, whole_choices(events, len(text_requests), job))
    return Response(reply.whole(choices), headers=headers, media_type="application/json")


def _model_name(fields: GenerationRequest) -> str:
    """With the LoRA adapter, whichever of the two fields names it."""
    name = fields.model
    if fields.lora_request is None or name.endswith(SEPARATOR + fields.lora_request.lora_name):
        return name
    return name + SEPARATOR + fields.lora_request.lora_name


async def _prompts(model: "TextModel", job: Job) -> Sequence[Prompt]:
    """The prompts; those that are continued more than once are prepared here, once."""
    if job.best_of == 1:
        return job.prompts
    return [await model.prepare_shared(prompt) for prompt in job.prompts]


def _reply(job: Job, model: str, request_id: str) -> Reply:
    reply_id = f"{job.reply.id_prefix}-{request_id}"
    return job.reply(reply_id=reply_id, created=int(time.time()), model=model, options=job.options)


async def stream_frames(events: IndexedEvents, reply: Reply, job: Job) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. What comes before the first text goes out with it."""
    ends: dict[int, TextEvent] = {}
    opening = reply.opening()
    try:
        async with aclosing(events):
            async for index, event in events:
                yield opening + reply.frame(index, event)
                opening = b""
                if event.finish_reason is not None:
                    ends[index] = event
    except SluiceError as error:
        job.name_in_client_s_words(error)
        raise
    yield reply.closing([ends[index] for index in sorted(ends)])


async def whole_choices(events: IndexedEvents, num_choices: int, job: Job) -> list[Choice]:
    """Every choice, complete, in the order of the prompts."""
    told: list[list[TextEvent]] = [[] for _ in range(num_choices)]
    try:
        async with aclosing(events):
            async for index, event in events:
                told[index].append(event)
    except SluiceError as error:
        job.name_in_client_s_words(error)
        raise
    return [_choice(of_one) for of_one in told]


def _choice(events: list[TextEvent]) -> Choice:
    details = [event.detail for event in events if event.detail is not None]
    return Choice(
        "".join([event.text for event in events]),
        events[-1],
        [entry for detail in details for entry in detail.logprobs or ()],
        next((detail.prompt_logprobs for detail in details if detail.prompt_logprobs is not None), None),
    )
