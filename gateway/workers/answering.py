"""The host's end of forwarded requests: answers them from its own application."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Message, Scope

from sluice.gateway.front.http.protocol import NAMES_AS_SENT
from sluice.gateway.front.http.sse import PIECE_WRITER
from sluice.gateway.workers.messages import Begin, OfRequest, Piece, Start
from sluice.gateway.workers.wire import Wire

_DECODER = msgspec.msgpack.Decoder(OfRequest)
_ENDED_BEFORE_ITS_ANSWER = "a forwarded request began before the one ahead of it had ended"


class ForwardedServer:
    """Serves an application to the workers, on a socket that only this user can reach. Belongs to the event loop."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app = app
        self._path = path
        self._server: asyncio.Server | None = None
        self._answers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to take requests."""
        self._server = await asyncio.get_running_loop().create_unix_server(self._connect, str(self._path))

    async def stop(self, timeout_s: float) -> None:
        """Give open requests `timeout_s` to end, then cancel them."""
        if self._server is not None:
            self._server.close()
        if self._answers:
            await asyncio.wait(self._answers, timeout=timeout_s)
        for each in self._answers:
            each.cancel()
        if self._answers:
            await asyncio.wait(self._answers)

    def _connect(self) -> "_RequestWire":
        return _RequestWire(self)

    def serve(self, wire: Wire[OfRequest]) -> None:
        """Answer the requests of a connection, one after the other."""
        task = asyncio.create_task(self._serve(wire), name="forwarded-requests")
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _serve(self, wire: Wire[OfRequest]) -> None:
        try:
            while (begin := await wire.read()) is not None:
                assert isinstance(begin, Begin), _ENDED_BEFORE_ITS_ANSWER
                answer = _Answer(wire)
                await self._app(_scope(begin, answer), answer.receive, answer.send)
                if not answer.is_complete or not await answer.read_rest():
                    break
        finally:
            wire.close()


class _RequestWire(Wire[OfRequest]):
    """A worker's connection."""

    def __init__(self, server: ForwardedServer) -> None:
        super().__init__(_DECODER)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.serve(self)


def _scope(begin: Begin, answer: "_Answer") -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": begin.http_version,
        "method": begin.method,
        "scheme": "http",
        "path": begin.path,
        "raw_path": begin.raw_path,
        "root_path": "",
        "query_string": begin.query,
        "headers": begin.headers,
        "client": begin.client,
        "server": None,
        "state": {},
        "extensions": {NAMES_AS_SENT: {"names": begin.names}, PIECE_WRITER: answer},
    }


class _Answer:
    """ASGI's two ends of one request."""

    def __init__(self, wire: Wire[OfRequest]) -> None:
        self._wire = wire
        self._has_body = False
        self.is_complete = False
        self.count: Callable[[bytes], None] | None = None

    async def receive(self) -> Message:
        if not self._has_body:
            piece = await self._wire.read()
            if isinstance(piece, Piece):
                self._has_body = piece.is_last
                return {"type": "http.request", "body": piece.body, "more_body": not piece.is_last}
        else:
            await self._wire.wait_closed()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            self._wire.send(Start(message["status"], headers))
            return
        self.is_complete = not message.get("more_body", False)
        await self._wire.write(Piece(message.get("body", b""), self.is_complete))

    async def write(self, piece: bytes) -> None:
        """Write a piece of an answer that goes on, as a `PieceWriter` does."""
        await self.drain()
        self.write_now(piece)

    def write_now(self, piece: bytes) -> bool:
        if piece:
            if self.count is not None:
                self.count(piece)
            self._wire.send(Piece(piece, is_last=False))
        return not self._wire.is_full

    async def drain(self) -> None:
        await self._wire.drain()

    async def read_rest(self) -> bool:
        """Read what the application did not want of the body. Returns whether it ended."""
        while not self._has_body:
            piece = await self._wire.read()
            if not isinstance(piece, Piece):
                return False
            self._has_body = piece.is_last
        return True
