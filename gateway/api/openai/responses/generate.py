"""Generates the events of a response, and keeps the response before its last event."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from sluice.engine.client.stream import Consumer
from sluice.errors import SluiceError
from sluice.gateway.api.openai.responses.archive import Archive, StoredConversation, StoredResponse
from sluice.gateway.api.openai.responses.create import PromptItems
from sluice.gateway.api.openai.responses.items import JsonObject
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.front.http.errors import as_sluice_error, client_names
from sluice.pipelines.text.consumers import Generate, Mapped, give
from sluice.state.interface import ABSENT

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ResponseTurn:
    """One response on its way: what generates it, the items of its prompt, and where it is kept.

    With `outlives_failures` events that fail after the first one end in a failed response, and else in an exception.
    `version` is that of its record.
    """

    owner: str
    request_id: str
    reply: ResponseReply
    generate: Generate
    items: PromptItems
    param_names: Mapping[str, str]
    outlives_failures: bool
    version: int = ABSENT

    @property
    def response(self) -> JsonObject:
        return self.reply.response

    @property
    def response_id(self) -> str:
        found: str = self.response["id"]
        return found


async def generate(turn: ResponseTurn, consumer: Consumer[list[bytes]]) -> None:
    """Push the events of a turn but for the last one. Cancelling it cancels the request."""
    reply = turn.reply
    try:
        with client_names(turn.param_names):
            await turn.generate(Mapped(reply.feed, consumer))
        reply.finish()
    except Exception as error:
        if not (turn.outlives_failures and reply.has_begun):
            raise
        await give(consumer, reply.fail(as_sluice_error(error, turn.request_id)))


async def generate_and_keep(turn: ResponseTurn, archive: Archive | None, consumer: Consumer[bytes]) -> None:
    """Push the events of a turn. It is kept before the last one, which clients may answer at once."""
    await generate(turn, Mapped(b"".join, consumer))
    if archive is not None:
        await keep(turn, archive)
    await give(consumer, turn.reply.closing())


async def keep(turn: ResponseTurn, archive: Archive, frames: list[bytes] | None = None) -> None:
    """Store the response with the `frames` that clients may ask for again, and append it to its conversation.

    A store that cannot be used takes no answer from a client: the response then says that it is not stored.
    """
    response = turn.response
    try:
        if response["store"]:
            stored = StoredResponse(orjson.dumps(response), orjson.dumps(turn.items.all), frames, turn.items.session)
            await archive.save(turn.owner, turn.response_id, stored, turn.version)
        if turn.items.conversation_id is not None and response["status"] in ("completed", "incomplete"):
            added = [*turn.items.new, *response["output"]]
            await archive.change_conversation(turn.owner, turn.items.conversation_id, lambda each: _append(each, added))
    except SluiceError as error:
        log.warning("response %s is not stored: %s", turn.response_id, error.message)
        response["store"] = False


def _append(conversation: StoredConversation, items: list[JsonObject]) -> None:
    conversation.items += items
