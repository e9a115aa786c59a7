"""OpenAI's API: chat completions, completions and the list of models, from request to HTTP answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from gateway.http.openai.chat import parse_chat_request
from gateway.http.openai.completions import parse_completion_request
from gateway.http.openai.reply import Choice, OpenAIReply, error_frame
from gateway.http.openai.requests import Job
from gateway.http.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.http.openapi import describe_body
from gateway.http.parsing import parse_body, warning_header
from gateway.http.request import Scheduling, get_request_id, parse_scheduling, read_body, run_while_connected
from gateway.http.sse import EventStreamResponse
from gateway.options.config import ServeConfig
from gateway.service import InferenceService
from pipelines.llm.text_models import SEPARATOR, AdapterText
from pipelines.rag import owner_keys
from pipelines.text.types import Prompt, TextEvent
from sluice.errors import SluiceError

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.text.model import TextModel

RequestT = TypeVar("RequestT", bound=GenerationRequest)
IndexedEvents = AsyncGenerator[tuple[int, TextEvent], None]


def router(service: InferenceService, config: ServeConfig) -> APIRouter:
    """Return the routes under /v1, which answer from `service`."""
    routes = OpenAIRoutes(service, config)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    api.post("/chat/completions", openapi_extra=describe_body(ChatCompletionRequest))(routes.chat_completions)
    api.post("/completions", openapi_extra=describe_body(CompletionRequest))(routes.completions)
    api.get("/models")(routes.models)
    api.get("/models/{model:path}")(routes.model)
    return api


class OpenAIRoutes:
    """Handlers of OpenAI's API over one service."""

    def __init__(self, service: InferenceService, config: ServeConfig) -> None:
        self._service = service
        self._options = config.http
        self._defaults = config.requests

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        fields, headers = await self._parse(request, ChatCompletionRequest)
        return await answer_request(
            self._service, request, parse_chat_request(fields), self._scheduling(request), headers
        )

    async def completions(self, request: Request) -> Response:
        """Continue one text or several."""
        fields, headers = await self._parse(request, CompletionRequest)
        return await answer_request(
            self._service, request, parse_completion_request(fields), self._scheduling(request), headers
        )

    async def models(self) -> Response:
        """List the models: language models first, then pipelines."""
        return _json(model_list(self._service.text_models()))

    async def model(self, model: str) -> Response:
        """Describe one of the models."""
        return _json(model_object(self._service.llm(model)))

    def _scheduling(self, request: Request) -> Scheduling:
        return parse_scheduling(request.headers, self._defaults)

    async def _parse(self, request: Request, schema: type[RequestT]) -> tuple[RequestT, dict[str, str]]:
        """Return the request's fields, and the headers that its answer must carry."""
        body = await read_body(request, self._options.max_input_bytes)
        fields, ignored = parse_body(schema, body, self._options.is_strict)
        return fields, warning_header(ignored)


def _json(payload: dict[str, object]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")


def model_list(models: Iterable["TextModel"]) -> dict[str, object]:
    return {"object": "list", "data": [model_object(model) for model in models]}


def model_object(model: "TextModel") -> dict[str, object]:
    """Return one model in OpenAI's words.

    vLLM adds `max_model_len`, in tokens, where it is known, and an adapter's folder (`root`) and model (`parent`).
    """
    fields = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sluice"}
    longest = model.max_model_len
    if longest is not None:
        fields["max_model_len"] = longest
    return {**fields, "root": model.root, "parent": model.parent} if isinstance(model, AdapterText) else fields


async def answer_request(
    service: InferenceService, request: Request, job: Job, scheduling: Scheduling, headers: dict[str, str]
) -> Response:
    """Generate the answer to `job`. The request's body must have been read.

    Raises SluiceError for a refusal and for a failure before the first byte of the answer.
    """
    model = service.llm(_model_name(job.fields), scheduling.sticky_key)
    job.check_model(model)
    request_id = get_request_id(request)
    reply = _reply(job, model.name, request_id)
    # A language model alone has no collection to open.
    key = request.headers.get(owner_keys.HEADER, "") if model.takes_parameters else ""
    text_requests = job.text_requests(request_id, scheduling, await _prompts(model, job), key)
    events = merge_streams([service.generate(model, one, job.reply.protocol) for one in text_requests])
    if job.fields.stream:
        return EventStreamResponse(stream_frames(events, reply, job), error_frame, headers)
    choices = await run_while_connected(request.receive, whole_choices(events, len(text_requests), job))
    return Response(reply.whole(choices), headers=headers, media_type="application/json")


def _model_name(fields: GenerationRequest) -> str:
    """Return the model's name with its LoRA adapter, whichever of the two fields names that."""
    name = fields.model
    if fields.lora_request is None or name.endswith(SEPARATOR + fields.lora_request.lora_name):
        return name
    return name + SEPARATOR + fields.lora_request.lora_name


async def _prompts(model: "TextModel", job: Job) -> Sequence[Prompt]:
    """Return the prompts. Those that are continued more than once are prepared here, once."""
    if job.best_of == 1:
        return job.prompts
    return [await model.prepare_shared(prompt) for prompt in job.prompts]


def _reply(job: Job, model: str, request_id: str) -> OpenAIReply:
    reply_id = f"{job.reply.id_prefix}-{request_id}"
    return job.reply(reply_id=reply_id, created=int(time.time()), model=model, options=job.options)


async def stream_frames(events: IndexedEvents, reply: OpenAIReply, job: Job) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a streamed answer. The opening goes out with the first text."""
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
        job.use_client_names(error)
        raise
    yield reply.closing([ends[index] for index in sorted(ends)])


async def whole_choices(events: IndexedEvents, num_choices: int, job: Job) -> list[Choice]:
    """Return every choice, complete, in the order of the prompts."""
    received: list[list[TextEvent]] = [[] for _ in range(num_choices)]
    try:
        async with aclosing(events):
            async for index, event in events:
                received[index].append(event)
    except SluiceError as error:
        job.use_client_names(error)
        raise
    return [_choice(events_of_one) for events_of_one in received]


def _choice(events: list[TextEvent]) -> Choice:
    details = [event.detail for event in events if event.detail is not None]
    return Choice(
        "".join([event.text for event in events]),
        events[-1],
        [entry for detail in details for entry in detail.logprobs or ()],
        next((detail.prompt_logprobs for detail in details if detail.prompt_logprobs is not None), None),
    )


async def merge_streams(streams: Sequence[AsyncGenerator[TextEvent, None]]) -> IndexedEvents:
    """Run `streams` concurrently and yield their events, each with the index of its stream.

    The first failure is raised and ends them all; so does closing this stream.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    arrivals: asyncio.Queue[tuple[int, TextEvent] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, arrivals)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield arrival
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(
    index: int,
    stream: AsyncGenerator[TextEvent, None],
    arrivals: "asyncio.Queue[tuple[int, TextEvent] | Exception | None]",
) -> None:
    """Put every event of `stream` into `arrivals`, then its end: None or the exception that it raised."""
    end: Exception | None = None
    async with aclosing(stream) as events:
        try:
            async for event in events:
                await arrivals.put((index, event))
        except Exception as error:
            end = error
    await arrivals.put(end)
