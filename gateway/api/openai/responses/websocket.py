"""Responses over WebSocket: each message is a request for a response, which is answered as one over HTTP."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
import orjson
from fastapi import Request, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.openai.responses.archive import Archive, PromptItems, ResponseRecord
from sluice.gateway.api.openai.responses.compaction import Summarizer
from sluice.gateway.api.openai.responses.create import ResponseTranslator
from sluice.gateway.api.openai.responses.items import JsonObject
from sluice.gateway.api.openai.responses.prompt import EarlierTurns
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest
from sluice.gateway.api.openai.responses.socket_session import (
    MAX_LANE_CHARS,
    MemoryBudget,
    SocketSession,
    SocketTurn,
    error_event,
)
from sluice.gateway.api.translators import Answering
from sluice.gateway.front.http.parsing import RequestObject
from sluice.gateway.front.http.sse import event_frame
from sluice.gateway.front.http.switching import SWITCHING, UPGRADE, Upgrade
from sluice.gateway.front.http.websocket import MessageSocket, accept_headers
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import TextEvent, TextRequest

_MAX_CONVERSATIONS = 4
"""Conversations of the longest kind for which there is room in the memory of all connections."""


class SocketEnvelope(RequestObject):
    """The fields by which a message asks for a response, and names its lane."""

    type: Literal["response.create"]
    stream_id: str | None = Field(None, max_length=MAX_LANE_CHARS, description="The lane; absent: that without one.")


class CreateResponseEvent(CreateResponseRequest, SocketEnvelope):
    """A message of a WebSocket at /v1/responses."""

    generate: bool | None = Field(None, description="false: prepare the prompt, and generate nothing.")


def _error_frame(error: SluiceError) -> bytes:
    return event_frame(orjson.loads(error_event(error)), "error")


class SocketResponse(Response):
    """Accepts a handshake, and serves the connection to its end."""

    def __init__(self, upgrade: Upgrade, headers: dict[str, str], max_bytes: int, budget: MemoryBudget) -> None:
        self.status_code = SWITCHING
        self.background = None
        self.raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._upgrade = upgrade
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = MessageSocket(self._upgrade.connections, self._max_bytes)
        self._upgrade.protocol = socket
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await SocketSession(scope, self._upgrade, socket, self._max_bytes, self._budget).run()


class SocketRecord(ResponseRecord):
    """A response that its connection remembers, whether it is stored or not."""

    turn: SocketTurn

    async def keep(self, frames: list[bytes] | None = None) -> None:
        await super().keep(frames)
        if self.response["status"] not in ("completed", "incomplete"):
            self.turn.note_failure()
            return
        items = [*self.items.all, *self.response["output"]]
        session = self.items.session or self.response_id.removeprefix("resp_")
        turn = self.turn
        turn.memory.keep(self.response_id, EarlierTurns(items, session), turn.lane, turn.follows, turn.size_bytes)


class WarmupReply(ResponseReply):
    """A response without output, whose prompt the engine has read."""

    def frame(self, index: int, event: TextEvent) -> bytes:
        frames = b"" if self._num_frames else self._begin()
        if event.finish_reason is not None:
            self._end = msgspec.structs.replace(event, finish_reason=FinishReason.STOP)
        return frames


class SocketTranslator(ResponseTranslator):
    """A response that a message asks for."""

    encode_error = staticmethod(_error_frame)
    fields: CreateResponseEvent

    def __init__(
        self,
        fields: CreateResponseEvent,
        request: Request,
        *,
        archive: Archive | None,
        summarizer: Callable[..., Summarizer],
        turn: SocketTurn,
    ) -> None:
        if fields.background:
            raise invalid("background", "background must be false over WebSocket, whose responses are always streamed")
        super().__init__(fields, request, archive=archive, runs=None, summarizer=summarizer)
        self.memory = turn.memory.turns
        self._turn = turn
        self._is_warmup = fields.generate is False
        if self._is_warmup:
            self.response_type = WarmupReply

    @property
    def is_streamed(self) -> bool:
        return True

    async def prepare(self, model: TextModel) -> Response | None:
        await self._turn.take_lane(self.fields.stream_id, self.fields.previous_response_id)
        try:
            return await super().prepare(model)
        except SluiceError as error:
            if error.param != "previous_response_id" or self.fields.previous_response_id in self.memory:
                raise
            raise _not_remembered(error) from None

    def parse(self, base: TextRequest) -> list[TextRequest]:
        requests = super().parse(base)
        if not self._is_warmup:
            return requests
        shortest = {"max_tokens": 1, "min_tokens": 0}
        return [msgspec.structs.replace(each, sampling={**each.sampling, **shortest}) for each in requests]

    def record(self, response: JsonObject, items: PromptItems) -> ResponseRecord:
        record = SocketRecord(self._archive, self._owner, response, items)
        record.turn = self._turn
        return record


def _not_remembered(error: SluiceError) -> SluiceError:
    """Return OpenAI's error for a response that neither the connection nor the store has."""
    code = "previous_response_not_found"
    return SluiceError(ErrorCode.INVALID, error.message, param=error.param, openai_code=code)


class SocketRoutes:
    """Handlers of WebSockets at /v1/responses."""

    def __init__(
        self,
        options: HttpOptions,
        archive: Archive | None,
        answering: Answering,
        summarizer: Callable[..., Summarizer],
    ) -> None:
        self._options = options
        self._answering = answering
        self._translate = partial(SocketTranslator, archive=archive, summarizer=summarizer)
        self._budget = MemoryBudget(_MAX_CONVERSATIONS * options.max_input_bytes)

    async def connect(self, request: Request) -> Response:
        """Accept a handshake. Raises METHOD_NOT_ALLOWED for a request without one, and INVALID for a wrong one."""
        upgrade: Upgrade | None = request.scope.get("extensions", {}).get(UPGRADE)
        if upgrade is None:
            message = "method GET is not allowed for /v1/responses but to open a WebSocket; ask for a response by POST"
            raise SluiceError(ErrorCode.METHOD_NOT_ALLOWED, message)
        accepted = accept_headers(request.headers)
        return SocketResponse(upgrade, accepted, self._options.max_input_bytes, self._budget)

    async def create(self, request: Request, turn: SocketTurn) -> Response:
        """Answer a message."""
        return await self._answering.answer(request, CreateResponseEvent, partial(self._translate, turn=turn))
