"""Server-sent events: their bytes, and the response that streams them until the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Self

import msgspec
import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sluice.engine.client.stream import Consumer
from sluice.errors import SluiceError
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.http.errors import as_sluice_error
from sluice.gateway.front.http.request import DETACHED, Detached, run_while_connected
from sluice.gateway.front.http.writing import PieceWriter
from sluice.pipelines.llm.activity import held_listener
from sluice.pipelines.text.stream import give

DONE = b"data: [DONE]\n\n"
"""Last event of every stream that is whole."""
PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for the text in a payload."""

PIECE_WRITER = "sluice.piece_writer"
"""Key of the ASGI scope's extension with a `PieceWriter` for the response once its first piece is sent: every layer of
the application that a piece passes on its way to the server costs as much as making it, and looks only at the first."""

WritePiece = Callable[[bytes], Awaitable[None]]
GenerateFrames = Callable[[Consumer[bytes]], Awaitable[None]]
"""Pushes the frames of a response to a consumer, up to the last one."""
EncodeError = Callable[[SluiceError], bytes]
"""Makes a protocol's final frame for a stream that failed."""

encode_text = msgspec.json.Encoder().encode
"""Encodes text as a JSON string in about 50 ns; orjson takes 75."""


class EventStreamResponse(Response):
    """Streams the frames that `generate` pushes, which are complete SSE events (`data: ...` with its blank line).

    The status goes out with the first frame, so that a failure up to there is raised and becomes an ordinary HTTP
    error; unless that takes as long as an engine may take to start (`FrameWriter.note_held`). A later one is written as
    `encode_error(error)`, and nothing after it: whatever the protocol ends a clean stream with is the last frame. So
    does the end of the sender's key.
    When the client disconnects, also before the first frame, `generate` is cancelled at once. Once the status is out,
    `keep_alive_frame` keeps the silence between frames under `keep_alive_s`.
    """

    media_type = "text/event-stream"
    keep_alive_frame = b": keep-alive\n\n"
    """A comment, which clients ignore."""

    def __init__(
        self,
        generate: GenerateFrames,
        encode_error: EncodeError,
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive_s: float = 0.0,
    ) -> None:
        """`keep_alive_s` 0: nothing is sent between frames."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._generate = generate
        self._encode_error = encode_error
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):  # nobody is left to answer
            await run_while_connected(receive, self._stream(scope, send))

    async def _stream(self, scope: Scope, send: Send) -> None:
        detached: Detached | None = scope.get(DETACHED)
        # Readers of an answer that is kept have silences of their own.
        keep_alive_s = self._keep_alive_s if detached is None else 0.0
        begin: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        writer = FrameWriter(scope, send, begin, self.keep_alive_frame, keep_alive_s)
        token = held_listener.set(writer.note_held if keep_alive_s else None)
        last = b""
        try:
            try:
                with ending_with_key():
                    await self._generate(writer)
            except Exception as error:
                if not writer.has_begun:
                    raise
                failure = as_sluice_error(error, scope["state"]["request_id"])
                last = self._encode_error(failure)
                if detached is not None:
                    detached.note_failure(failure)
            await writer.ready()
        finally:
            held_listener.reset(token)
            writer.end()
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def push_all(frames: AsyncGenerator[bytes, None], consumer: Consumer[bytes]) -> None:
    """Push what a generator yields."""
    async with aclosing(frames):
        async for frame in frames:
            await give(consumer, frame)


class FrameWriter:
    """The consumer of a response's frames, the last one on their way: begins the response with the first frame, and
    writes the others to the connection where that takes pieces. Frames of several streams may come in any order."""

    def __init__(self, scope: Scope, send: Send, begin: Message, keep_alive_frame: bytes, keep_alive_s: float) -> None:
        """`begin` is the message with the response's status."""
        self.has_begun = False
        self._send = send
        self._begin = begin
        self._keep_alive_frame = keep_alive_frame
        self._keep_alive_s = keep_alive_s
        self._direct: PieceWriter | None = scope.get("extensions", {}).get(PIECE_WRITER)
        self._writer: PieceWriter | None = None
        """Writes frames at once; None while they are to be sent as messages."""
        self._unsent = b""
        self._sending = asyncio.Lock()
        self._silence = SilenceBreaker(send, b"", 0.0)
        """Sends keep-alive frames once the response has begun."""
        self._timer: asyncio.TimerHandle | None = None
        self._early: asyncio.Task[None] | None = None

    def take(self, frame: bytes) -> bool:
        if self._writer is None:
            self._unsent += frame
            return False
        self._silence.num_sent += 1
        return self._writer.write_now(frame)

    async def ready(self) -> None:
        """Send what was taken, and wait until the client reads it."""
        if self._writer is not None:
            await self._writer.drain()
            return
        async with self._sending:
            if not self.has_begun:
                await self._send_first(self._take_unsent())
            while self._unsent:
                await self._send_piece(self._take_unsent())
            self._writer = self._direct

    def note_held(self) -> None:
        """Begin the response after half of `keep_alive_s`, so that no proxy takes it for dead: the request waits for an
        engine to start. Any other begins with its first frame, since an error before that has a status of its own."""
        if self._timer is None and not self.has_begun:
            self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s / 2, self._start_early)

    def end(self) -> None:
        """Send no more of its own accord."""
        for each in (self._timer, self._early):
            if each is not None:
                each.cancel()
        self._silence.end()

    def _start_early(self) -> None:
        if not self.has_begun:
            self._early = asyncio.ensure_future(self._begin_early())

    async def _begin_early(self) -> None:
        async with self._sending:
            if not self.has_begun:
                await self._send_first(self._keep_alive_frame)

    async def _send_first(self, piece: bytes) -> None:
        await self._send(self._begin)
        self.has_begun = True
        await self._send_piece(piece)
        self._silence = SilenceBreaker(self._send, self._keep_alive_frame, self._keep_alive_s)

    async def _send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._silence.num_sent += 1

    def _take_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent


def find_piece_writer(scope: Scope, send: Send) -> WritePiece:
    """Return the server's own writer of pieces, where it has one for this response, whose first piece was sent."""

    async def write(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    direct: PieceWriter | None = scope.get("extensions", {}).get(PIECE_WRITER)
    return write if direct is None else direct.write


class SilenceBreaker:
    """Sends a frame when a stream has been silent for half of `longest_s`, and again after each further half.

    A timer looks twice in that time whether the stream's `num_sent` has changed: a frame costs one addition.
    """

    __slots__ = ("_frame", "_last_seen", "_period_s", "_send", "_sending", "_timer", "num_sent")

    def __init__(self, send: Send, frame: bytes, longest_s: float) -> None:
        """Begin at once. `longest_s` 0: never send."""
        self.num_sent = 0
        self._send = send
        self._frame = frame
        self._period_s = longest_s / 2
        self._last_seen = 0
        self._sending: asyncio.Task[None] | None = None
        self._timer = self._start_timer() if longest_s else None

    def end(self) -> None:
        """Send nothing from here on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _start_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._period_s, self._look)

    def _look(self) -> None:
        is_silent = self.num_sent == self._last_seen
        self._last_seen = self.num_sent
        if is_silent and (self._sending is None or self._sending.done()):  # not done: the client reads nothing
            self._sending = asyncio.ensure_future(self._send_frame())
        self._timer = self._start_timer()

    async def _send_frame(self) -> None:
        await self._send({"type": "http.response.body", "body": self._frame, "more_body": True})


def event_frame(payload: Mapping[str, Any], name: str = "") -> bytes:
    """Return one server-sent event that carries `payload` as JSON, with the `name` that some protocols give it."""
    frame = b"data: " + orjson.dumps(payload) + b"\n\n"
    return b"event: " + name.encode() + b"\n" + frame if name else frame


class TextFrame(NamedTuple):
    """The bytes of a server-sent event before and after its text, made once for a stream."""

    before: bytes
    after: bytes

    @classmethod
    def around(cls, payload: Mapping[str, Any], name: str = "") -> Self:
        """Make the frame of an event, with a `name` where the protocol names its events, that carries `payload`, in
        which one value is PLACEHOLDER."""
        before, _, after = event_frame(payload, name).rpartition(orjson.dumps(PLACEHOLDER))
        return cls(before, after)

    def fill(self, text: str) -> bytes:
        return self.before + encode_text(text) + self.after
