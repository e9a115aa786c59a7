"""OpenAI's responses over HTTP, what becomes of stored ones, and conversations with the items in them."""

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.streams.store import StreamStore
from sluice.gateway.api.openai.rendering import rendering
from sluice.gateway.api.openai.responses.archive import Archive, FoundResponse, StoredConversation, open_archive
from sluice.gateway.api.openai.responses.background import BackgroundRun, BackgroundRuns
from sluice.gateway.api.openai.responses.compaction import Summarizer
from sluice.gateway.api.openai.responses.create import PARAM_NAMES, CompactTranslator, ResponseTranslator, error_frame
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject, Limit, Order, PageQuery, list_page, make_mark
from sluice.gateway.api.openai.responses.prompt import conversation_of, gather_items, need_archive, store_items
from sluice.gateway.api.openai.responses.schemas import (
    AddItemsRequest,
    CompactRequest,
    CountInputRequest,
    CreateConversationRequest,
    CreateResponseRequest,
    UpdateConversationRequest,
)
from sluice.gateway.api.openai.responses.socket_session import find_turn
from sluice.gateway.api.openai.responses.tools import declared_tools
from sluice.gateway.api.openai.responses.websocket import SocketRoutes
from sluice.gateway.api.translators import Answering, count_prompt
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.request import owner_of
from sluice.gateway.front.http.sse import EventStreamResponse, GenerateFrames, push_all
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.tenancy.access.control import TENANT_HEADER
from sluice.pipelines.text.stream import give

PATH = "/v1/responses"


def router(plane: Plane, config: ServeConfig, answering: Answering, streams: StreamStore, rooms: Rooms) -> APIRouter:
    """Return the routes under /v1/responses and /v1/conversations."""
    archive = open_archive(config.responses, config.state_folder())
    runs = None if archive is None else BackgroundRuns(archive, streams=streams)
    routes = ResponseRoutes(plane, config, archive, runs, streams)
    if archive is not None and runs is not None:
        rooms.join(notice=archive.problem, close=archive.close)
        rooms.join(close=runs.close)
    api = APIRouter(prefix=PATH, tags=["OpenAI"], default_response_class=Response)
    summarizer = partial(Summarizer, plane, config.requests)
    translate = partial(ResponseTranslator, archive=archive, runs=runs, summarizer=summarizer)
    about = "Answer, whole, streamed or in the background."
    sockets = SocketRoutes(config.http, archive, answering, summarizer)

    async def create(request: Request) -> Response:
        turn = find_turn(request)
        if turn is not None:
            return await sockets.create(request, turn)
        return await answering.answer(request, CreateResponseRequest, translate)

    api.post("", name="create", description=about, openapi_extra=describe_body(CreateResponseRequest))(create)
    api.get("", include_in_schema=False)(sockets.connect)
    about = "Return the prompt in tokens, as `/inference/v1/generate` takes it."
    answering.serve(api, "/render", "render_response", about, CreateResponseRequest, rendering(translate))
    api.post("/input_tokens", openapi_extra=describe_body(CountInputRequest, (TENANT_HEADER,)))(routes.count_input)
    about = "Summarize items, as the input of the next response."
    compact = partial(CompactTranslator, archive=archive, runs=runs, summarizer=summarizer)
    answering.serve(api, "/compact", "compact", about, CompactRequest, compact)
    api.get("/{response_id}")(routes.retrieve)
    api.delete("/{response_id}")(routes.delete)
    api.post("/{response_id}/cancel")(routes.cancel)
    api.get("/{response_id}/input_items")(routes.input_items)
    api.routes.extend(_conversation_router(config, archive).routes)
    return api


def _conversation_router(config: ServeConfig, archive: Archive | None) -> APIRouter:
    """Return the routes under /v1/conversations. `archive` None: nothing is stored."""
    routes = ConversationRoutes(config, archive)
    api = APIRouter(prefix="/v1/conversations", tags=["OpenAI"], default_response_class=Response)
    one, items = "/{conversation_id}", "/{conversation_id}/items"
    api.post("", openapi_extra=describe_body(CreateConversationRequest, (TENANT_HEADER,)))(routes.create)
    api.get(one)(routes.retrieve)
    api.post(one, openapi_extra=describe_body(UpdateConversationRequest, (TENANT_HEADER,)))(routes.update)
    api.delete(one)(routes.delete)
    api.post(items, openapi_extra=describe_body(AddItemsRequest, (TENANT_HEADER,)))(routes.add_items)
    api.get(items)(routes.items)
    api.get(f"{items}/{{item_id}}")(routes.item)
    api.delete(f"{items}/{{item_id}}")(routes.delete_item)
    return api


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
        self._archive = archive
        self._runs = runs
        self._shared = streams.shared

    async def count_input(self, request: Request) -> Response:
        """Count the tokens of a prompt."""
        fields, headers = await read_fields(request, CountInputRequest, self._options)
        items = await gather_items(self._archive, owner_of(request.headers), fields, ItemIds(make_mark()))
        model = self._plane.llm(fields.model)
        with client_names(PARAM_NAMES):
            tools = declared_tools(fields, items.all)
            conversation, _ = conversation_of(fields, items.all, tools, has_result_images=False)
        count = {
            "object": "response.input_tokens",
            "input_tokens": await count_prompt(model, conversation, PARAM_NAMES),
        }
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

    def _stream(self, frames: GenerateFrames) -> Response:
        return EventStreamResponse(frames, error_frame, keep_alive_s=self._options.sse_keep_alive_s)

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


class ConversationRoutes:
    """Handlers of /v1/conversations over one archive."""

    def __init__(self, config: ServeConfig, archive: Archive | None) -> None:
        self._options = config.http
        self._archive = archive

    async def create(self, request: Request) -> Response:
        """Begin a conversation."""
        fields, headers = await read_fields(request, CreateConversationRequest, self._options)
        archive, owner, mark = self._stored(), owner_of(request.headers), make_mark()
        items = await store_items(archive, owner, fields.items or (), ItemIds(mark), "items")
        conversation = StoredConversation(int(time.time()), fields.metadata or {}, items)
        await archive.add_conversation(owner, f"conv_{mark}", conversation)
        return json_response(_object(f"conv_{mark}", conversation), headers=headers)

    async def retrieve(self, request: Request, conversation_id: str) -> Response:
        """Return a conversation without its items."""
        conversation = await self._stored().conversation(owner_of(request.headers), conversation_id)
        return json_response(_object(conversation_id, conversation))

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replace a conversation's metadata."""
        fields, headers = await read_fields(request, UpdateConversationRequest, self._options)

        def change(conversation: StoredConversation) -> None:
            conversation.metadata = fields.metadata or {}

        changed = await self._stored().change_conversation(owner_of(request.headers), conversation_id, change)
        return json_response(_object(conversation_id, changed), headers=headers)

    async def delete(self, request: Request, conversation_id: str) -> Response:
        """Delete a conversation. The responses made in it stay."""
        await self._stored().delete_conversation(owner_of(request.headers), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request, conversation_id: str) -> Response:
        """Append items."""
        fields, headers = await read_fields(request, AddItemsRequest, self._options)
        archive, owner = self._stored(), owner_of(request.headers)
        items = await store_items(archive, owner, fields.items, ItemIds(make_mark()), "items")

        def change(conversation: StoredConversation) -> None:
            conversation.items += items

        await archive.change_conversation(owner, conversation_id, change)
        return json_response(list_page(items, PageQuery(None, len(items), "asc")), headers=headers)

    async def items(
        self, request: Request, conversation_id: str, after: str | None = None, limit: Limit = 20, order: Order = "desc"
    ) -> Response:
        """List a conversation's items."""
        conversation = await self._stored().conversation(owner_of(request.headers), conversation_id)
        return json_response(list_page(conversation.items, PageQuery(after, limit, order)))

    async def item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Return one of a conversation's items."""
        conversation = await self._stored().conversation(owner_of(request.headers), conversation_id)
        return json_response(_find_item(conversation, item_id))

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Delete one of a conversation's items, and return the conversation."""

        def change(conversation: StoredConversation) -> None:
            conversation.items.remove(_find_item(conversation, item_id))

        changed = await self._stored().change_conversation(owner_of(request.headers), conversation_id, change)
        return json_response(_object(conversation_id, changed))

    def _stored(self) -> Archive:
        return need_archive(self._archive, "conversation_id")


def _object(conversation_id: str, conversation: StoredConversation) -> JsonObject:
    head = {"id": conversation_id, "object": "conversation", "created_at": conversation.created_at}
    return {**head, "metadata": conversation.metadata}


def _find_item(conversation: StoredConversation, item_id: str) -> JsonObject:
    for item in conversation.items:
        if item["id"] == item_id:
            return item
    raise SluiceError(ErrorCode.NOT_FOUND, f"the conversation has no item {item_id[:100]!r}", param="item_id")
