"""OpenAI's API: chat completions, completions and the list of models, from request to HTTP answer."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from sluice.engine.client.stream import Consumer
from sluice.gateway.api.anthropic.models import is_anthropics, models_response
from sluice.gateway.api.openai.chat import ChatReply, parse_chat_request
from sluice.gateway.api.openai.completions import CompletionReply, parse_completion_request
from sluice.gateway.api.openai.parts import PartsReply
from sluice.gateway.api.openai.reply import Choice, OpenAIReply, ReplyOptions, error_frame
from sluice.gateway.api.openai.requests import (
    check_beams,
    check_trust,
    model_name,
    requested_priority,
    with_owner_key,
    without_effect,
)
from sluice.gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from sluice.gateway.api.tools import SCHEMA_FIELDS, parse_with_schemas
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import parse_pieces_of_body, refuse_without_effect, warning_header
from sluice.gateway.front.http.request import (
    get_begin_time,
    get_request_id,
    parse_scheduling,
    read_pieces,
    run_while_connected,
)
from sluice.gateway.front.http.sse import EventStreamResponse
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding.classifier import TextClassifier
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.reranker import ModelReranker
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.routes.encoder import RoutedEncoder
from sluice.pipelines.routes.text import RoutedText
from sluice.pipelines.text.consumers import Called, Generate, Mapped, give
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.parts import ChatReader
from sluice.pipelines.text.stream import share_request
from sluice.pipelines.text.types import OWNER_KEY_HEADER, TextEvent, TextRequest
from sluice.serving.task_model import gather_all

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Parse = Callable[[RequestT, TextRequest], tuple[list[TextRequest], ReplyOptions]]
"""Parses a body to the requests of its sequences. They differ from the given request only in what the body says."""
ListedModel = TextModel | TextEncoder | LlmEncoder | RoutedEncoder | ModelReranker | TextClassifier
_STARTS_PER_TURN = 16
"""Sequences of one request that are submitted in one turn of the event loop."""


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the routes under /v1, and those that vLLM has beside it, which answer from `plane`."""
    routes = OpenAIRoutes(plane, config)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    api.post("/chat/completions", openapi_extra=describe_body(ChatCompletionRequest))(routes.chat_completions)
    api.post("/completions", openapi_extra=describe_body(CompletionRequest))(routes.completions)
    api.get("/models")(routes.models)
    api.get("/models/{model:path}")(routes.model)
    return api


class OpenAIRoutes:
    """Handlers of OpenAI's API over one data plane."""

    def __init__(self, plane: Plane, config: ServeConfig) -> None:
        self._plane = plane
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
        model = self._plane.llm(model_name(fields), scheduling.sticky_key or fields.prompt_cache_key or "")
        with client_names(options.param_names):
            readers = [reader for each in requests if (reader := model.chat_reader(each)) is not None]
        relaxed = [*options.relaxed, *(readers[0].relaxed if readers else ())]
        headers = self._warnings(ignored, relaxed, without_effect(fields, requests[0].prompt, model))
        check_beams(fields, model.max_beam_width)
        key = request.headers.get(OWNER_KEY_HEADER)
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
        texts = [self._plane.generate(model, each) for each in requests]
        if fields.stream:
            frames = partial(stream_frames, texts, reply, options)
            return EventStreamResponse(frames, error_frame, headers, keep_alive_s=self._options.sse_keep_alive_s)
        choices = await run_while_connected(request.receive, whole_choices(texts, options, readers))
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
            return models_response(request, self._plane)
        models = [*self._plane.text_models(), *self._models_without_text()]
        return json_response({"object": "list", "data": [model_object(model) for model in models]})

    async def model(self, request: Request, model: str) -> Response:
        """Describe one of the models."""
        if is_anthropics(request):
            return models_response(request, self._plane, model)
        others = {each.name: each for each in self._models_without_text()}
        return json_response(model_object(others[model] if model in others else self._plane.llm(model)))

    def _models_without_text(self) -> list[ListedModel]:
        plane = self._plane
        return [
            *plane.encoding.encoders(),
            *plane.routes.encoders(),
            *plane.encoding.rerankers(),
            *plane.encoding.classifiers(),
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


async def stream_frames(
    texts: Sequence[Generate], reply: OpenAIReply, options: ReplyOptions, consumer: Consumer[bytes]
) -> None:
    """Push the server-sent events of a streamed answer. The first failure ends all its texts."""
    with client_names(options.param_names), share_request(options.num_prompts, len(texts)) as begin:

        async def stream(index: int, generate: Generate) -> None:
            begin(index // options.best_of)
            await _await_turn(index)
            await generate(Mapped(partial(reply.frame, index), consumer))

        await gather_all([stream(*each) for each in enumerate(texts)])
    await give(consumer, reply.closing())


async def whole_choices(
    texts: Sequence[Generate], options: ReplyOptions, readers: Sequence[ChatReader] = ()
) -> list[Choice]:
    """Return every choice, complete, in the order of the prompts. The first failure ends them all."""
    with client_names(options.param_names), share_request(options.num_prompts, len(texts)) as begin:

        async def collect(index: int, generate: Generate, reader: ChatReader | None) -> Choice:
            begin(index // options.best_of)
            await _await_turn(index)
            return await _collect_choice(generate, reader)

        return await gather_all([collect(i, *each) for i, each in enumerate(zip_longest(texts, readers))])


async def _await_turn(index: int) -> None:
    """Let the event loop serve others before the sequence `index` of a request starts, after each few: it takes a
    fifth of a millisecond to submit one, and a request may have hundreds."""
    for _ in range(index // _STARTS_PER_TURN):
        await asyncio.sleep(0)


async def _collect_choice(generate: Generate, reader: ChatReader | None) -> Choice:
    events: list[TextEvent] = []
    await generate(Called(events.append))
    details = [event.detail for event in events if event.detail is not None]
    parts = [] if reader is None else [part for event in events for part in reader.read(event)]
    return Choice("".join([event.text for event in events]), events[-1], details, parts)
