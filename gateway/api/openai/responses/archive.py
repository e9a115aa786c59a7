"""Keeps responses and conversations, and knows which of the responses are being generated."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time

import msgspec
import orjson

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.openai.responses.items import JsonObject, mark_of
from sluice.gateway.front.path_masking import client_message
from sluice.gateway.options.responses import ResponsesOptions
from sluice.state.connections import FileLimits, Schema
from sluice.state.interface import ABSENT, Key, Put, RedisLayout, Store
from sluice.state.opening import open_store
from sluice.state.sqlite import RECORDS, Bounds, FileLayout

log = logging.getLogger(__name__)
FINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""States after which a response does not change."""
LEASE_S = 15.0
"""How long a server that generates a response in the background may be silent until others call the response failed."""
_MAX_TRIES = 64
"""Most attempts to change a conversation that others change at the same time."""
_TURN_BYTES = 1 << 20
"""Bytes of items after which others have their turn of the event loop."""
_RUNNER_ENDED = "the server that generated this response ended before it was complete"
_FILE_LIMITS = FileLimits(num_readers=2, survives_power_cuts=False)  # each response would wait for the disk
_IN_FILE = FileLayout("--responses-store {}", Schema(0x536C7270, (RECORDS,)), _FILE_LIMITS)
_IN_REDIS = RedisLayout("sluice:responses:", "--responses-store")
_ERROR_CODES = {ErrorCode.INVALID: "invalid_prompt", ErrorCode.OVERLOADED: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses; every other failure is a server_error."""
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder


class StoredResponse(msgspec.Struct, array_like=True):
    """A response as it is kept. `body` and `context` are JSON: its object, and the items of its prompt. `frames` are
    the events of one that was streamed in the background; None for others."""

    body: bytes
    context: bytes
    frames: list[bytes] | None = None
    session: str = ""
    """The session that it goes on with; "" where it is the first of its chain, whose mark is the session then."""

    def items(self) -> list[JsonObject]:
        """Return the items of its prompt."""
        found: list[JsonObject] = orjson.loads(self.context)
        return found


class FoundResponse(msgspec.Struct):
    """A stored response, its object as it is now, and the version of its record."""

    stored: StoredResponse
    response: JsonObject
    version: int

    @property
    def is_final(self) -> bool:
        return self.response["status"] in FINAL


class StoredConversation(msgspec.Struct):
    """A conversation as it is kept. Times are in seconds since 1970."""

    created_at: int
    metadata: dict[str, str]
    items: list[JsonObject]


class Archive:
    """Keeps responses and conversations in a store. Every method raises UNAVAILABLE where the store cannot be used
    now."""

    def __init__(self, store: Store, ttl_s: float, max_bytes: int) -> None:
        """A record is kept for `ttl_s` after its last change, and has `max_bytes` at most."""
        self._store = store
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._read_response = _decode(StoredResponse).decode
        self._read_conversation = _decode(StoredConversation).decode

    async def close(self) -> None:
        await self._store.close()

    def problem(self) -> str:
        """Return why the store could not be used the last time; "" where it could."""
        return self._store.problem()

    async def _put(self, key: Key, body: bytes, version: int, ttl_s: float | None = None) -> bool:
        """Write a record over its `version`. False where it has another. Raises TOO_LARGE."""
        if len(body) > self._max_bytes:
            message = f"{len(body)} bytes cannot be stored; the store takes {self._max_bytes} (--responses-max-size)"
            raise SluiceError(ErrorCode.TOO_LARGE, message)
        return await self._store.put(Put(key, body, version, ttl_s or self._ttl_s))

    # --- responses ---

    async def save(self, owner: str, response_id: str, stored: StoredResponse, version: int = ABSENT) -> bool:
        """Write a response over its `version`. False where it was changed or deleted meanwhile."""
        return await self._put(Key(owner, response_id), _encode(stored), version)

    async def find(self, owner: str, response_id: str, param: str = "response_id") -> FoundResponse:
        """Return the owner's response. One that nobody generates any more has failed. Raises NOT_FOUND."""
        record = await self._store.get(Key(owner, response_id)) if response_id.startswith("resp_") else None
        if record is None:
            raise _not_found("response", response_id, param)
        stored = self._read_response(record.body)
        found = FoundResponse(stored, orjson.loads(stored.body), record.version)
        if not found.is_final:
            lease = await self._store.get(_lease_key(owner, response_id))
            found.response["status"] = "failed" if lease is None else lease.body.decode()
            if lease is None:
                found.response["error"] = error_object(SluiceError(ErrorCode.INTERNAL, _RUNNER_ENDED))
        return found

    async def find_item(self, owner: str, item_id: str) -> JsonObject | None:
        """Return an item of a stored response, of its prompt or its output; None where there is none."""
        try:
            found = await self.find(owner, f"resp_{mark_of(item_id)}")
        except SluiceError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None
            raise
        items = [*found.response["output"], *found.stored.items()]
        return next((item for item in items if item["id"] == item_id), None)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete the owner's response. A server that generates it stops. Raises NOT_FOUND."""
        await self.end_lease(owner, response_id)
        if not await self._store.delete(Key(owner, response_id)):
            raise _not_found("response", response_id, "response_id")

    async def cancel(self, owner: str, response_id: str, found: FoundResponse) -> JsonObject:
        """Return the response, cancelled unless it has ended, which makes the server stop that generates it."""
        if found.is_final:
            return found.response
        await self.end_lease(owner, response_id)
        cancelled = {**found.response, "status": "cancelled"}
        stored = msgspec.structs.replace(found.stored, body=orjson.dumps(cancelled), frames=None)
        if await self.save(owner, response_id, stored, found.version):
            return cancelled
        return (await self.find(owner, response_id)).response

    async def renew_lease(self, owner: str, response_id: str, status: str, version: int) -> bool:
        """Say that this server generates the response, for the time `version` + 1. False where another has ended it."""
        return await self._put(_lease_key(owner, response_id), status.encode(), version, LEASE_S)

    async def end_lease(self, owner: str, response_id: str) -> None:
        """End the generation of a response, here or on another server, which learns of it at its next renewal."""
        await self._store.delete(_lease_key(owner, response_id))

    # --- conversations ---

    async def add_conversation(self, owner: str, conversation_id: str, conversation: StoredConversation) -> None:
        """Add a conversation under an id that no other has."""
        await self._put(Key(owner, conversation_id), _encode(conversation), ABSENT)

    async def conversation(
        self, owner: str, conversation_id: str, param: str = "conversation_id"
    ) -> StoredConversation:
        """Return the owner's conversation. Raises NOT_FOUND."""
        return (await self._conversation(owner, conversation_id, param))[0]

    async def _conversation(self, owner: str, conversation_id: str, param: str) -> tuple[StoredConversation, int]:
        is_one = conversation_id.startswith("conv_")
        record = await self._store.get(Key(owner, conversation_id)) if is_one else None
        if record is None:
            raise _not_found("conversation", conversation_id, param)
        return self._read_conversation(record.body), record.version

    async def change_conversation(
        self, owner: str, conversation_id: str, change: Callable[[StoredConversation], None]
    ) -> StoredConversation:
        """Return the conversation with a `change` made to it, which is made again where others change it meanwhile.

        Raises NOT_FOUND, and OVERLOADED where they change it all the time.
        """
        for _ in range(_MAX_TRIES):
            conversation, version = await self._conversation(owner, conversation_id, "conversation_id")
            change(conversation)
            if await self._put(Key(owner, conversation_id), _encode(conversation), version):
                return conversation
        message = f"conversation {conversation_id} is changed by too many requests at once; try again"
        raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=1)

    async def delete_conversation(self, owner: str, conversation_id: str) -> None:
        """Delete the owner's conversation. Raises NOT_FOUND."""
        is_one = conversation_id.startswith("conv_")
        if not (is_one and await self._store.delete(Key(owner, conversation_id))):
            raise _not_found("conversation", conversation_id, "conversation_id")


@dataclass(frozen=True, slots=True)
class PromptItems:
    """The items of a prompt in their stored form: those of earlier turns, and the new ones."""

    earlier: list[JsonObject]
    new: list[JsonObject]
    conversation_id: str | None = None
    session: str = ""
    """The conversation, or what the responses of one chain have in common; "" for a first response."""

    @property
    def all(self) -> list[JsonObject]:
        return [*self.earlier, *self.new]


@dataclass(slots=True)
class ResponseRecord:
    """A response on its way into the archive: its object, the items of its prompt, and its record's `version`.

    `archive` None: nothing is kept.
    """

    archive: Archive | None
    owner: str
    response: JsonObject
    items: PromptItems
    version: int = ABSENT

    @property
    def response_id(self) -> str:
        found: str = self.response["id"]
        return found

    async def keep(self, frames: list[bytes] | None = None) -> None:
        """Store the response with the `frames` that clients may ask for again, and append it to its conversation.

        A store that cannot be used takes no answer from a client: the response then says that it is not stored.
        """
        archive, response, items = self.archive, self.response, self.items
        if archive is None:
            return
        try:
            if response["store"]:
                sent = await encode_items(items.all)
                stored = StoredResponse(orjson.dumps(response), sent, frames, items.session)
                await archive.save(self.owner, self.response_id, stored, self.version)
            if items.conversation_id is not None and response["status"] in ("completed", "incomplete"):
                added = [*items.new, *response["output"]]
                await archive.change_conversation(self.owner, items.conversation_id, lambda each: _append(each, added))
        except SluiceError as error:
            log.warning("response %s is not stored: %s", self.response_id, error.message)
            response["store"] = False


async def encode_items(items: Sequence[JsonObject]) -> bytes:
    """Return items as JSON. Between long ones others have their turn of the event loop."""
    pieces, num_bytes = list[bytes](), 0
    for item in items:
        pieces.append(orjson.dumps(item))
        num_bytes += len(pieces[-1])
        if num_bytes > _TURN_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    encoded = b"[%b]" % b",".join(pieces)
    if len(encoded) > _TURN_BYTES:
        await asyncio.sleep(0)
    return encoded


def _append(conversation: StoredConversation, items: list[JsonObject]) -> None:
    conversation.items += items


def error_object(error: SluiceError) -> JsonObject:
    """Return the field `error` of a response that failed."""
    code = _ERROR_CODES.get(error.code, "server_error")
    return {"code": code, "message": client_message(error), "param": error.param}


def open_archive(options: ResponsesOptions, state_folder: Path, clock: Callable[[], float] = time) -> Archive | None:
    """Return the archive, which opens its store at the first use; None where nothing is kept."""
    place = options.store_place(state_folder)
    if place is None:
        return None
    store = open_store(place, _IN_FILE, _IN_REDIS, Bounds(options.max_records, options.max_bytes), clock)
    return Archive(store, options.ttl_s, options.max_bytes)


def _lease_key(owner: str, response_id: str) -> Key:
    return Key(owner, f"lease_{response_id}")


def _not_found(kind: str, found_id: str, param: str) -> SluiceError:
    message = f"{kind} {found_id[:100]!r} not found: it was never stored, has expired or is another owner's"
    return SluiceError(ErrorCode.NOT_FOUND, message, param=param)
