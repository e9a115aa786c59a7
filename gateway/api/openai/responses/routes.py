"""OpenAI's responses over HTTP: created whole, streamed or in the background, and what becomes of stored ones."""

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.streams.store import StreamStore
from sluice.gateway.api.openai.requests import model_name, requested_priority, with_owner_key
from sluice.gateway.api.openai.responses import conversations
from sluice.gateway.api.openai.responses.archive import Archive, FoundResponse, open_archive
from sluice.gateway.api.openai.responses.background import BackgroundRun, BackgroundRuns
from sluice.gateway.api.openai.responses.create import (
    PARAM_NAMES,
    PROTOCOL,
    check_fields,
    conversation_of,
    fit_prompt,
    gather_items,
    need_archive,
    parse_request,
    response_object,
    template_fields_without_effect,
)
from sluice.gateway.api.openai.responses.generate import ResponseTurn, generate_and_keep
from sluice.gateway.api.openai.responses.items import ItemIds, Limit, Order, PageQuery, list_page, make_mark
from sluice.gateway.api.openai.responses.reply import ResponseReply, error_object
from sluice.gateway.api.openai.responses.schemas import CountInputRequest, CreateResponseRequest
from sluice.gateway.api.openai.responses.tools import declared_tools, tools_without_effect
from sluice.gateway.api.tools import parse_with_schemas
from sluice.gateway.front.http.bodies import json_response, read_body, read_fields
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import refuse_without_effect, warning_header
from sluice.gateway.front.http.request import (
    get_begin_time,
    get_request_id,
    owner_of,
    parse_scheduling,
    run_while_connected,
)
from sluice.gateway.front.http.sse import EventStreamResponse, GenerateFrames, event_frame, push_all
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.tenancy.access.control import TENANT_HEADER
from sluice.pipelines.text.consumers import Called, give
from sluice.pipelines.text.model import UNCOUNTED_IMAGES, refuse_images
from sluice.pipelines.text.types import OWNER_KEY_HEADER, EncodedPrompt, TextRequest


def router(plane: Plane, config: ServeConfig, streams: StreamStore, rooms: Rooms) -> APIRouter:
    """Return the routes under /v1/responses and /v1/conversations."""
    archive = open_archive(config.responses, config.state_folder())
    runs = None if archive is None else BackgroundRuns(archive, find_streams=lambda: streams)
    routes = ResponseRoutes(plane, config, archive, runs, streams)
    if archive is not None and runs is not None:
        rooms.join(notice=archive.problem, close=archive.close)
        rooms.join(close=runs.close)
    api = APIRouter(prefix="/v1/responses", tags=["OpenAI"], default_response_class=Response)
    api.post("", openapi_extra=describe_body(CreateResponseRequest))(routes.create)
    api.post("/input_tokens", openapi_extra=describe_body(CountInputRequest, (TENANT_HEADER,)))(routes.count_input)
    api.post("/compact", include_in_schema=False)(_refuse_to_compact)  # else it is a response's id, and a 405
    api.get("/{response_id}")(routes.retrieve)
    api.delete("/{response_id}")(routes.delete)
    api.post("/{response_id}/cancel")(routes.cancel)
    api.get("/{response_id}/input_items")(routes.input_items)
    api.routes.extend(conversations.router(config, archive).routes)
    return api


def _refuse_to_compact() -> Response:
    """Raise NOT_FOUND for OpenAI's compaction of a conversation."""
    message = "/v1/responses/compact is not served; send the items themselves, or previous_response_id"
    raise SluiceError(ErrorCode.NOT_FOUND, message, openai_code="unknown_url")


class ResponseRoutes:
    """Handlers of /v1/responses over one data plane."""

    def __init__(
        self,
        plane: Plane,
        config: ServeConfig,
        archive: Archive | None,
        runs: BackgroundRuns | None,
        streams: StreamStore,
    ) -> None:
        self._plane = plane
        self._options = config.http
        self._defaults = config.requests
        self._archive = archive
        self._runs = runs
        self._shared = streams.shared

    async def create(self, request: Request) -> Response:
        """Answer, whole, streamed or in the background."""
        fields, ignored = await read_body(request, CreateResponseRequest, self._options)
        check_fields(fields, self._archive)
        turn, headers = await self._begin(request, fields, ignored)
        if fields.background and self._runs is not None:
            run = await self._runs.start(turn, is_streamed=bool(fields.stream))
            if run.kept is None:
                return json_response(run.response, headers=headers)
            return self._stream(partial(push_all, run.kept.follow(0)), headers)
        if fields.stream:
            return self._stream(partial(generate_and_keep, turn, self._archive), headers)
        await run_while_connected(request.receive, generate_and_keep(turn, self._archive, Called(lambda frame: None)))
        return json_response(turn.response, headers=headers)

    async def _begin(
        self, request: Request, fields: CreateResponseRequest, ignored: list[str]
    ) -> tuple[ResponseTurn, dict[str, str]]:
        """Return the turn that answers, and the headers of the answer. Raises SluiceError for a refusal."""
        request_id, mark = get_request_id(request), make_mark()
        scheduling = parse_scheduling(request.headers, self._defaults)
        owner, ids = owner_of(request.headers), ItemIds(mark)
        model = self._plane.llm(model_name(fields), scheduling.sticky_key or fields.prompt_cache_key or "")
        items = await gather_items(self._archive, owner, fields, ids)
        with client_names(PARAM_NAMES):
            prompt = await fit_prompt(fields, items.all, model)
        queued = scheduling.fields(requested_priority(fields), session=fields.prompt_cache_key or items.session or mark)
        base = TextRequest(request_id=request_id, prompt="", protocol=PROTOCOL, **queued)
        work = partial(parse_request, fields, base, prompt)
        text_request, options = await parse_with_schemas(fields, work, lambda parsed: parsed[0])
        without_effect = [*template_fields_without_effect(fields, model), *tools_without_effect(fields)]
        if self._options.is_strict:
            refuse_without_effect(without_effect)
        key = request.headers.get(OWNER_KEY_HEADER)
        if key and model.takes_parameters:
            text_request = with_owner_key(text_request, key)
        reader = model.chat_reader(text_request)
        relaxed = [*options.relaxed, *(reader.relaxed if reader is not None else ())]
        response = response_object(f"resp_{mark}", fields, model.name, options.service_tier, get_begin_time(request))
        response["store"] = response["store"] and self._archive is not None
        turn = ResponseTurn(
            owner,
            request_id,
            ResponseReply(response, ids, options.top_logprobs, reader, declared_tools(fields)),
            self._plane.generate(model, text_request),
            items,
            options.param_names,
            outlives_failures=bool(fields.stream or fields.background),
        )
        return turn, warning_header(ignored, relaxed, without_effect)

    async def count_input(self, request: Request) -> Response:
        """Count the tokens of a prompt."""
        fields, headers = await read_fields(request, CountInputRequest, self._options)
        items = await gather_items(self._archive, owner_of(request.headers), fields, ItemIds(make_mark()))
        model = self._plane.llm(fields.model)
        with client_names(PARAM_NAMES):
            conversation = conversation_of(fields, items.all)
            refuse_images(conversation, UNCOUNTED_IMAGES)
            prompt = await model.prepare_shared(conversation)
        if not isinstance(prompt, EncodedPrompt):
            reason = "a pipeline, which adds what it retrieves to the prompt; name a language model"
            raise invalid("model", f"model '{model.name}' is {reason}")
        count = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        return json_response(count, headers=headers)

    async def retrieve(
        self,
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        """Return a stored response; with `stream` the events of one that was streamed in the background."""
        archive, owner = self._stored(), owner_of(request.headers)
        run = self._running(owner, response_id)
        if run is not None and not stream:
            return json_response(run.response)
        if run is not None and run.kept is not None:
            return self._stream(partial(push_all, run.kept.follow(starting_after + 1)))
        found = await archive.find(owner, response_id)
        if not stream:
            return json_response(found.response)
        shared = None if found.is_final else await self._follow_elsewhere(owner, response_id, starting_after + 1)
        if shared is not None:
            return self._stream(partial(push_all, shared))
        return self._stream(partial(give, event=b"".join(_kept_frames(found)[starting_after + 1 :])))

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Stop a response that is generated in the background, and return it. One that has ended is left as it is."""
        archive, owner = self._stored(), owner_of(request.headers)
        run = self._running(owner, response_id)
        if run is not None and self._runs is not None:
            await self._runs.cancel(run)
            return json_response(run.response)
        found = await archive.find(owner, response_id)
        if not found.response["background"]:
            message = f"response {response_id} was not made with background true; close its connection to cancel one"
            raise invalid("response_id", message)
        return json_response(await archive.cancel(owner, response_id, found))

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response. One that is generated in the background stops."""
        archive, owner = self._stored(), owner_of(request.headers)
        run = self._running(owner, response_id)
        if run is not None and self._runs is not None:
            await self._runs.cancel(run)
        await archive.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self, request: Request, response_id: str, after: str | None = None, limit: Limit = 20, order: Order = "desc"
    ) -> Response:
        """List the items of a stored response's prompt."""
        found = await self._stored().find(owner_of(request.headers), response_id)
        return json_response(list_page(found.stored.items(), PageQuery(after, limit, order)))

    def _stream(self, frames: GenerateFrames, headers: Mapping[str, str] | None = None) -> Response:
        return EventStreamResponse(frames, _error_frame, headers, keep_alive_s=self._options.sse_keep_alive_s)

    async def _follow_elsewhere(self, owner: str, response_id: str, start: int) -> AsyncGenerator[bytes, None] | None:
        """Return the events of a response that another server generates; None where it shares none."""
        kept = None if self._shared is None else await self._shared.find(owner, response_id)
        return None if kept is None else kept.follow(start)

    def _stored(self) -> Archive:
        return need_archive(self._archive, "response_id")

    def _running(self, owner: str, response_id: str) -> BackgroundRun | None:
        return None if self._runs is None else self._runs.find(owner, response_id)


def _kept_frames(found: FoundResponse) -> list[bytes]:
    """Return the events of a response. Raises INVALID for one without, and UNAVAILABLE for one of another server."""
    if found.stored.frames is not None:
        return found.stored.frames
    if found.is_final:
        message = "stream must be false: only responses made with background and stream true keep their events"
        raise invalid("stream", message)
    message = "the response is generated by another server, which alone has its events until it is complete"
    raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=1)


def _error_frame(error: SluiceError) -> bytes:
    """Return the event of a stream that broke before its response could end."""
    return event_frame({"type": "error", **error_object(error)}, "error")
