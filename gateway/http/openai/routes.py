"""OpenAI's API: chat completions, completions and the list of models, from request to HTTP answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import zip_longest
from typing import Self, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from sluice.gateway.http.anthropic.models import is_anthropics, models_response
from sluice.gateway.http.bodies import json_response
from sluice.gateway.http.errors import client_names
from sluice.gateway.http.openai import adapters, classify, embeddings, rerank, tokens
from sluice.gateway.http.openai.chat import ChatReply, parse_chat_request
from sluice.gateway.http.openai.completions import CompletionReply, parse_completion_request
from sluice.gateway.http.openai.parts import PartsReply
from sluice.gateway.http.openai.reply import Choice, OpenAIReply, ReplyOptions, error_frame
from sluice.gateway.http.openai.requests import (
    check_beams,
    check_trust,
    model_name,
    requested_priority,
    with_owner_key,
    without_effect,
)
from sluice.gateway.http.openai.responses import routes as responses
from sluice.gateway.http.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from sluice.gateway.http.openapi import describe_body
from sluice.gateway.http.parsing import parse_pieces_of_body, refuse_without_effect, warning_header
from sluice.gateway.http.request import (
    get_begin_time,
    get_request_id,
    parse_scheduling,
    read_pieces,
    run_while_connected,
)
from sluice.gateway.http.routers import add_routes
from sluice.gateway.http.sse import EventStreamResponse
from sluice.gateway.http.tools import SCHEMA_FIELDS, parse_with_schemas
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.path_masking import hide_paths
from sluice.gateway.service import InferenceService
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.rag import owner_keys
from sluice.pipelines.rag.classifier import TextClassifier
from sluice.pipelines.rag.encoder import TextEncoder
from sluice.pipelines.rag.llm_encoder import LlmEncoder
from sluice.pipelines.rag.retrieval.reranker import ModelReranker
from sluice.pipelines.routes.encoder import RoutedEncoder
from sluice.pipelines.routes.text import RoutedText
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.parts import ChatReader
from sluice.pipelines.text.relay import RelayedEvents, Sink
from sluice.pipelines.text.stream import share_request
from sluice.pipelines.text.types import TextEvent, TextRequest
from sluice.serving.task_model import gather_all

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Parse = Callable[[RequestT, TextRequest], tuple[list[TextRequest], ReplyOptions]]
"""Parses a body to the requests of its sequences. They differ from the given request only in what the body says."""
ListedModel = TextModel | TextEncoder | LlmEncoder | RoutedEncoder | ModelReranker | TextClassifier
Events = AsyncGenerator[TextEvent, None]
_STARTS_PER_TURN = 16
"""Sequences of one request that are submitted in one turn of the event loop."""


def router(service: InferenceService, config: ServeConfig) -> APIRouter:
    """Return the routes under /v1, and those that vLLM has beside it, which answer from `service`."""
    routes = OpenAIRoutes(service, config)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    api.post("/chat/completions", openapi_extra=describe_body(ChatCompletionRequest))(routes.chat_completions)
    api.post("/completions", openapi_extra=describe_body(CompletionRequest))(routes.completions)
    api.get("/models")(routes.models)
    api.get("/models/{model:path}")(routes.model)
    for part in (adapters, embeddings, rerank, classify, tokens, responses):
        add_routes(api, part.router(service, config))
    return api


class OpenAIRoutes:
    """Handlers of OpenAI's API over one service."""

    def __init__(self, service: InferenceService, config: ServeConfig) -> None:
        self._service = service
        self._options = config.http
        self._defaults = config.requests

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, ChatCompletionRequest, parse_chat_request, ChatReply)

    async def completions(self, request: Request) -> Response:
        """Continue one text or several."""
        return await self._answer(request, CompletionRequest, parse_completion_request, CompletionReply)

    async def _answer(
        self, request: Request, schema: type[RequestT], parse: Parse[RequestT], reply_type: type[OpenAIReply]
    ) -> Response:
        """Generate the answer. Raises SluiceError for a refusal and for a failure before its first byte."""
        async with aclosing(read_pieces(request, self._options.max_input_bytes)) as pieces:
            fields, ignored = await parse_pieces_of_body(schema, pieces, self._options.is_strict)
        check_trust(fields, trusts_templates=self._defaults.trusts_templates)
        request_id = get_request_id(request)
        scheduling = parse_scheduling(request.headers, self._defaults)
        queued = scheduling.fields(requested_priority(fields), session=fields.prompt_cache_key)
        base = TextRequest(request_id=request_id, prompt="", protocol=reply_type.protocol, **queued)
        if SCHEMA_FIELDS.isdisjoint(fields.model_fields_set):
            requests, options = parse(fields, base)
        else:
            work = partial(parse, fields, base)
            requests, options = await parse_with_schemas(fields, work, lambda parsed: parsed[0][0])
        model = self._service.llm(model_name(fields), scheduling.sticky_key or fields.prompt_cache_key or "")
        with client_names(options.param_names):
            readers = [reader for each in requests if (reader := model.chat_reader(each)) is not None]
        relaxed = [*options.relaxed, *(readers[0].relaxed if readers else ())]
        headers = self._warnings(ignored, relaxed, without_effect(fields, requests[0].prompt, model))
        check_beams(fields, model.max_beam_width)
        key = request.headers.get(owner_keys.HEADER)
        if key and model.takes_parameters:  # a language model alone has no collection to open
            requests = [with_owner_key(each, key) for each in requests]
        if options.best_of > 1:
            requests = await _share_prompts(model, requests, options.best_of)
        make_reply = partial(PartsReply, readers=readers) if readers else reply_type
        reply = make_reply(
            reply_id=f"{reply_type.id_prefix}-{request_id}",
            created=int(get_begin_time(request)),
            model=model.name,
            fingerprint=model.fingerprint,
            options=options,
        )
        streams = [self._service.generate(model, each) for each in requests]
        if fields.stream:
            frames = stream_frames(streams, reply, options)
            return EventStreamResponse(frames, error_frame, headers, keep_alive_s=self._options.sse_keep_alive_s)
        choices = await run_while_connected(request.receive, whole_choices(streams, options, readers))
        return Response(reply.whole(choices), headers=headers, media_type="application/json")

    def _warnings(
        self, ignored: Sequence[str], relaxed: Sequence[str], without_effect: Sequence[str]
    ) -> dict[str, str]:
        """Return the header that warns the client. Raises INVALID instead where the server is strict."""
        if self._options.is_strict:
            refuse_without_effect(without_effect)
        return warning_header(ignored, relaxed, without_effect)

    async def models(self, request: Request) -> Response:
        """List the models: language models first, then pipelines, then encoders, rerankers and classifiers."""
        if is_anthropics(request):
            return models_response(request, self._service)
        models = [*self._service.text_models(), *self._models_without_text()]
        return json_response({"object": "list", "data": [model_object(model) for model in models]})

    async def model(self, request: Request, model: str) -> Response:
        """Describe one of the models."""
        if is_anthropics(request):
            return models_response(request, self._service, model)
        others = {each.name: each for each in self._models_without_text()}
        return json_response(model_object(others[model] if model in others else self._service.llm(model)))

    def _models_without_text(self) -> list[ListedModel]:
        service = self._service
        return [
            *service.encoding.encoders(),
            *service.routes.encoders(),
            *service.encoding.rerankers(),
            *service.encoding.classifiers(),
        ]


def model_object(model: ListedModel) -> dict[str, object]:
    """Return one model in OpenAI's words.

    vLLM adds `max_model_len`, in tokens, where it is known, and an adapter's folder (`root`) and model (`parent`).
    Routes have their targets.
    """
    fields = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sluice"}
    longest = model.max_model_len
    if longest is not None:
        fields["max_model_len"] = longest
    if isinstance(model, AdapterText):
        fields |= {"root": hide_paths(model.root), "parent": model.parent}
    if isinstance(model, RoutedText | RoutedEncoder):
        fields["route"] = model.route.describe()
    return fields


async def _share_prompts(model: TextModel, requests: Sequence[TextRequest], best_of: int) -> list[TextRequest]:
    """Prepare each prompt once for its `best_of` requests, which stand side by side."""
    prompts = [await model.prepare_shared(first.prompt, first.prompt_form) for first in requests[::best_of]]
    return [msgspec.structs.replace(each, prompt=prompts[i // best_of]) for i, each in enumerate(requests)]


def stream_frames(streams: Sequence[Events], reply: OpenAIReply, options: ReplyOptions) -> AsyncGenerator[bytes, None]:
    """Return the server-sent events of a streamed answer. Those of a single stream may be relayed."""
    frames, source = _stream_frames(streams, reply, options), streams[0]
    if len(streams) > 1 or not isinstance(source, RelayedEvents):
        return frames

    def divert(sink: Sink[bytes]) -> None:
        source.divert(Sink(lambda event: sink.receive(reply.frame(0, event)), sink.is_open))

    return RelayedEvents(frames, divert)


async def _stream_frames(
    streams: Sequence[Events], reply: OpenAIReply, options: ReplyOptions
) -> AsyncGenerator[bytes, None]:
    with client_names(options.param_names):
        if len(streams) == 1:
            async with aclosing(streams[0]) as events:
                async for event in events:
                    yield reply.frame(0, event)
        else:
            with share_request(options.num_prompts, len(streams)) as begin:
                async with aclosing(MergedStreams(streams, lambda index: begin(index // options.best_of))) as merged:
                    async for index, event in merged:
                        yield reply.frame(index, event)
    yield reply.closing()


async def whole_choices(
    streams: Sequence[Events], options: ReplyOptions, readers: Sequence[ChatReader] = ()
) -> list[Choice]:
    """Return every choice, complete, in the order of the prompts. The first failure ends them all."""
    with client_names(options.param_names), share_request(options.num_prompts, len(streams)) as begin:
        prompts = [index // options.best_of for index in range(len(streams))]
        each = enumerate(zip_longest(streams, readers, prompts))
        return await gather_all([_collect_choice(i, *rest, begin) for i, rest in each])


async def _await_turn(index: int) -> None:
    """Let the event loop serve others before the sequence `index` of a request starts, after each few: it takes a
    fifth of a millisecond to submit one, and a request may have hundreds."""
    for _ in range(index // _STARTS_PER_TURN):
        await asyncio.sleep(0)


async def _collect_choice(
    index: int, stream: Events, reader: ChatReader | None, prompt: int, begin: Callable[[int], None]
) -> Choice:
    begin(prompt)
    async with aclosing(stream):
        await _await_turn(index)
        events = [event async for event in stream]
    details = [event.detail for event in events if event.detail is not None]
    parts = [] if reader is None else [part for event in events for part in reader.read(event)]
    return Choice("".join([event.text for event in events]), events[-1], details, parts)


class MergedStreams:
    """Runs streams concurrently and iterates over their events, each with the index of its stream.

    The first failure is raised and ends them all; so does closing. At most as many events wait for a slow reader as
    there are streams.
    """

    def __init__(self, streams: Sequence[Events], begin: Callable[[int], None] = lambda index: None) -> None:
        """`begin` is called in the task of each stream, with its index, before its start."""
        self._streams = streams
        self._begin = begin
        self._num_open = len(streams)
        self._arrivals: asyncio.Queue[tuple[int, TextEvent] | Exception | None] = asyncio.Queue(len(streams))
        self._pumps: list[asyncio.Task[None]] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, TextEvent]:
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(*each)) for each in enumerate(self._streams)]
        while self._num_open:
            arrival = await self._arrivals.get()
            if isinstance(arrival, Exception):
                await self.aclose()
                raise arrival
            if arrival is not None:
                return arrival
            self._num_open -= 1
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close every stream. Idempotent."""
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _pump(self, index: int, stream: Events) -> None:
        """Pass on every event of `stream`, then its end: None or the exception that it raised."""
        end: Exception | None = None
        self._begin(index)
        async with aclosing(stream) as events:
            try:
                await _await_turn(index)
                async for event in events:
                    await self._arrivals.put((index, event))
            except Exception as error:
                end = error
        await self._arrivals.put(end)
