"""OpenAI's conversations over HTTP, and the items in them."""

import time

from fastapi import APIRouter, Request, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.openai.responses.archive import Archive, StoredConversation
from sluice.gateway.api.openai.responses.create import need_archive, store_items
from sluice.gateway.api.openai.responses.items import (
    ItemIds,
    JsonObject,
    Limit,
    Order,
    PageQuery,
    list_page,
    make_mark,
)
from sluice.gateway.api.openai.responses.schemas import (
    AddItemsRequest,
    CreateConversationRequest,
    UpdateConversationRequest,
)
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.request import owner_of
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.tenancy.access.control import TENANT_HEADER


def router(config: ServeConfig, archive: Archive | None) -> APIRouter:
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
