"""One WebSocket connection for responses: its messages as requests to the application, its lanes, and its memory.

The responses of one lane (`stream_id`) come one after the other, those of several side by side. The connection
remembers its latest responses, so that the next may follow them though nothing stores them.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass

import msgspec
import orjson
from fastapi import Request
from starlette.types import Message, Scope

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.service import split_events
from sluice.gateway.answers.streams.wishes import HEADERS as WISHES
from sluice.gateway.api.openai.responses.prompt import EarlierTurns
from sluice.gateway.front.http.errors import HTTP_STATUS, as_sluice_error, error_headers, openai_error_body
from sluice.gateway.front.http.sse import PIECE_WRITER
from sluice.gateway.front.http.switching import Upgrade
from sluice.gateway.front.http.websocket import MessageSocket, SocketMessage
from sluice.gateway.front.http.writing import PieceWriter

CONNECTION_S = 3600.0
"""Longest time of a connection, as OpenAI has it."""
MAX_OPEN = 32
"""Most messages of a connection that wait or are answered."""
_MAX_REFUSED = 32
"""Most messages beyond these whose refusal the client has not read: then it is not read either."""
_MAX_REMEMBERED = 32
"""Most responses that a connection remembers."""
MAX_LANE_CHARS = 256
_SHORT_BYTES = 64 << 10
"""Length up to which a message that could not be read is looked into for its lane."""
_PIECE_BYTES = 256 << 10
_TURN = "sluice.socket_turn"
"""Key of the ASGI scope's extension with the `SocketTurn` of a request that came as a message."""
_ID_HEADER = b"x-request-id"
_OF_HANDSHAKE = frozenset((b"connection", b"upgrade", b"content-length", b"content-encoding", b"content-type"))
"""Headers that are not those of each message, beside `sec-websocket-...` and wishes about kept streams."""
_OF_ANSWER = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")
"""Headers of a refusal that its event has."""
_EVENT_DATA = b"data: "


class _Lane(msgspec.Struct):
    stream_id: str = ""


def error_event(error: SluiceError) -> bytes:
    """Return the event of an error, as JSON."""
    return _error_json(openai_error_body(error), HTTP_STATUS[error.code], error_headers(error))


def _error_json(body: bytes, status: int, headers: dict[str, str]) -> bytes:
    shown = {name: headers[name] for name in _OF_ANSWER if name in headers}
    error = {**orjson.loads(body)["error"], **({"headers": shown} if shown else {})}
    return orjson.dumps({"type": "error", "status": status, "error": error})


@dataclass(frozen=True, slots=True)
class _Remembered:
    turns: EarlierTurns
    lane: str
    size_bytes: int
    """Bytes of the messages up to this response."""


class MemoryBudget:
    """The memory that all connections share. Where it is full, those that answered longest ago forget everything."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[ResponseMemory, int] = OrderedDict()

    def note(self, memory: "ResponseMemory", size_bytes: int) -> None:
        """Note how much a connection remembers, 0 for one that has ended."""
        self._sizes.pop(memory, None)
        if size_bytes:
            self._sizes[memory] = size_bytes
        while sum(self._sizes.values()) > self._max_bytes:
            self._sizes.popitem(last=False)[0].clear()


class ResponseMemory:
    """The latest responses of a connection: those that end their lanes longest."""

    def __init__(self, max_bytes: int, budget: MemoryBudget) -> None:
        """The messages that led to what is remembered have `max_bytes` at most."""
        self.turns: dict[str, EarlierTurns] = {}
        self._max_bytes = max_bytes
        self._budget = budget
        self._known: dict[str, _Remembered] = {}
        self._latest: dict[str, str] = {}
        """The last response of each lane."""

    def keep(self, response_id: str, turns: EarlierTurns, lane: str, follows: str | None, size_bytes: int) -> None:
        """Remember a response to a message of so many bytes, which `follows` another."""
        before = self._known.get(follows or "")
        size_bytes += 0 if before is None else before.size_bytes
        if size_bytes > self._max_bytes:
            return
        self.turns[response_id] = turns
        self._known[response_id] = _Remembered(turns, lane, size_bytes)
        self._latest[lane] = response_id
        while len(self._known) > _MAX_REMEMBERED or self._num_bytes > self._max_bytes:
            self.forget(next((each for each in self._known if not self._ends_lane(each)), next(iter(self._known))))
        self._budget.note(self, self._num_bytes)

    def clear(self) -> None:
        """Forget all responses."""
        for response_id in [*self._known]:
            self.forget(response_id)
        self._budget.note(self, 0)

    def forget(self, response_id: str) -> None:
        """Forget a response, if it is remembered."""
        known = self._known.pop(response_id, None)
        self.turns.pop(response_id, None)
        if known is not None and self._latest.get(known.lane) == response_id:
            del self._latest[known.lane]

    @property
    def _num_bytes(self) -> int:
        return sum(each.size_bytes for each in self._known.values())

    def _ends_lane(self, response_id: str) -> bool:
        return self._latest.get(self._known[response_id].lane) == response_id


class SocketTurn:
    """One message of a connection, from its arrival to the end of its answer: the client's side of an ASGI request."""

    def __init__(self, session: "SocketSession", message: SocketMessage, before: "SocketTurn | None") -> None:
        """`before` is the turn of the message before, whose lane is known first."""
        self.memory = session.memory
        self.lane = ""
        self.follows: str | None = None
        self.size_bytes = len(message.body)
        self.has_lane = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._session = session
        self._problem = message.problem
        self._unread = memoryview(message.body)
        self._short = message.body if self.size_bytes <= _SHORT_BYTES else b""
        self._before = before
        self._has_read = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._refusal = b""
        self._suffix = b"}"
        """The end of each event, with the lane where it has one."""

    async def take_lane(self, stream_id: str | None, follows: str | None) -> None:
        """Wait until the responses to earlier messages of the lane are complete. The response `follows` another."""
        if self._before is not None:
            await self._before.has_lane.wait()
            self._before = None
        self._name_lane(stream_id)
        self.follows = follows
        ahead = self._session.lanes.get(self.lane)
        self._session.lanes[self.lane] = self
        self.has_lane.set()
        if ahead is not None:
            await ahead.has_ended.wait()

    def end(self) -> None:
        """Let the next message have its turn."""
        self.has_lane.set()
        self.has_ended.set()
        self._before = None
        if self._session.lanes.get(self.lane) is self:
            del self._session.lanes[self.lane]

    def note_failure(self) -> None:
        """Forget the response that the failed one follows, as OpenAI does."""
        if self.follows is not None:
            self.memory.forget(self.follows)

    def fail(self, error: SluiceError) -> None:
        """Say that the answer breaks off."""
        self.note_failure()
        self._session.socket.write_now(error_event(error)[:-1] + self._suffix)

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    # --- ASGI ---

    async def receive(self) -> Message:
        """Return the next piece of the message, of which nothing follows the last. Raises what is wrong with it."""
        if self._problem is not None:
            raise self._problem
        if self._has_read:
            await asyncio.Event().wait()  # when the client leaves, the request is cancelled
        piece, self._unread = bytes(self._unread[:_PIECE_BYTES]), self._unread[_PIECE_BYTES:]
        self._has_read = not self._unread
        return {"type": "http.request", "body": piece, "more_body": bool(self._unread)}

    async def send(self, message: Message) -> None:
        """Send the events of an answer, or one event of a refusal."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        elif self._status >= 400:
            self._refusal += message.get("body", b"")
            if not message.get("more_body", False):
                await self._refuse()
        else:
            self.write(message.get("body", b""))
            await self._session.socket.drain()

    def write(self, frames: bytes) -> bool:
        """Write the events of frames, each as a message. Returns whether the client reads them."""
        texts = _events_of(frames)
        if self.lane:
            texts = [text[:-1] + self._suffix for text in texts]
        return self._session.socket.write_now(*texts)

    async def drain(self) -> None:
        await self._session.socket.drain()

    async def _refuse(self) -> None:
        self.note_failure()
        if not self._refusal:
            return  # the client is gone
        if not self.has_lane.is_set() and self._short:
            with suppress(msgspec.DecodeError):
                self._name_lane(msgspec.json.decode(self._short, type=_Lane).stream_id)
        await self._session.socket.drain()
        event = _error_json(self._refusal, self._status, self._headers)
        self._session.socket.write_now(event[:-1] + self._suffix)

    def _name_lane(self, stream_id: str | None) -> None:
        self.lane = (stream_id or "")[:MAX_LANE_CHARS]
        if self.lane:
            self._suffix = b',"stream_id":%b}' % orjson.dumps(self.lane)


def _events_of(frames: bytes) -> list[bytes]:
    """Return the payloads of server-sent events, without the comments between them."""
    events = [frame.partition(_EVENT_DATA) for frame in split_events(frames) if not frame.startswith(b":")]
    return [payload[:-2] for _, _, payload in events if payload]


class _EventWriter(PieceWriter):
    """Writes the frames of a stream that has begun as messages."""

    __slots__ = ("_turn",)

    def __init__(self, turn: SocketTurn) -> None:
        self._turn = turn
        self.count = None

    def write_now(self, piece: bytes) -> bool:
        if self.count is not None:
            self.count(piece)
        return self._turn.write(piece)

    async def drain(self) -> None:
        await self._turn.drain()


class SocketSession:
    """One connection: makes a request of each message, and has the application answer it."""

    def __init__(
        self, scope: Scope, upgrade: Upgrade, socket: MessageSocket, max_bytes: int, budget: MemoryBudget
    ) -> None:
        """`scope` is that of the handshake, whose headers each request has."""
        self.socket = socket
        self.memory = ResponseMemory(max_bytes, budget)
        self.lanes: dict[str, SocketTurn] = {}
        """The last turn of each lane that has any."""
        self._app = upgrade.app
        self._max_bytes = max_bytes
        self._scope = _message_scope(scope)
        self._connection_id: str = scope["state"]["request_id"]
        self._num_messages = 0
        self._is_over = False
        self._turns: dict[asyncio.Task[None], SocketTurn] = {}
        self._last: SocketTurn | None = None
        self._room = asyncio.Semaphore(MAX_OPEN + _MAX_REFUSED)

    async def run(self) -> None:
        """Answer messages until the client leaves, or the connection's time is over."""
        timer = asyncio.get_running_loop().call_later(CONNECTION_S, self._end)
        try:
            while (message := await self.socket.receive()) is not None:
                await self._room.acquire()
                self._begin(message)
                await asyncio.sleep(0)  # dozens may have come at once
        finally:
            timer.cancel()
            for task in self._turns:
                task.cancel()
            if self._turns:
                await asyncio.wait(self._turns)
            self.memory.clear()

    def _begin(self, message: SocketMessage) -> None:
        message.problem = message.problem or self._find_refusal(message)
        turn = self._last = SocketTurn(self, message, self._last)
        self._num_messages += 1
        self.socket.num_open += 1
        task = asyncio.create_task(self._answer(turn, self._num_messages), context=Context())
        self._turns[task] = turn
        task.add_done_callback(self._finish)

    def _find_refusal(self, message: SocketMessage) -> SluiceError | None:
        """Return why a message is not answered; None where it is."""
        if self._is_over:
            return _limit_reached()
        num_unread = sum(each.num_unread for each in self._turns.values())
        if len(self._turns) < MAX_OPEN and num_unread + len(message.body) <= self._max_bytes:
            return None
        text = (
            f"at most {MAX_OPEN} responses of a connection may wait; wait for one of them, or open another connection"
        )
        return SluiceError(ErrorCode.OVERLOADED, text, retry_after_s=1)

    async def _answer(self, turn: SocketTurn, number: int) -> None:
        request_id = f"{self._connection_id}-{number}"
        headers = [*self._scope["headers"], (_ID_HEADER, request_id.encode())]
        extensions = {_TURN: turn, PIECE_WRITER: _EventWriter(turn)}
        scope = {**self._scope, "headers": headers, "state": {}, "extensions": extensions}
        try:
            await self._app(scope, turn.receive, turn.send)
        except Exception as error:  # of an answer that has begun, whose client would wait for its end
            turn.fail(as_sluice_error(error, request_id))

    def _finish(self, task: asyncio.Task[None]) -> None:
        turn = self._turns.pop(task)
        turn.end()
        if self._last is turn:
            self._last = None
        self._room.release()
        self.socket.finish_one()

    def _end(self) -> None:
        self._is_over = True
        self.socket.end(error_event(_limit_reached()), 1000)


def _limit_reached() -> SluiceError:
    minutes = f"{CONNECTION_S / 60:.0f} minutes"
    message = f"the connection has reached its limit of {minutes}; open another one to go on"
    return SluiceError(ErrorCode.INVALID, message, openai_code="websocket_connection_limit_reached")


def _message_scope(handshake: Scope) -> Scope:
    """Return what the requests of a connection have in common."""
    kept = {name: handshake[name] for name in ("asgi", "http_version", "server", "client", "scheme", "root_path")}
    headers = [
        (name, value)
        for name, value in handshake["headers"]
        if name not in _OF_HANDSHAKE
        and name not in WISHES
        and name != _ID_HEADER
        and not name.startswith(b"sec-websocket-")
    ]
    headers.append((b"content-type", b"application/json"))
    parts = {"path": handshake["path"], "raw_path": handshake["raw_path"], "query_string": b"", "headers": headers}
    return {"type": "http", "method": "POST", **kept, **parts}


def find_turn(request: Request) -> SocketTurn | None:
    """Return the turn of a request that came as a message; None for one over HTTP."""
    turn: SocketTurn | None = request.scope.get("extensions", {}).get(_TURN)
    return turn
