"""Server-sent events: their bytes, and the response that streams them until the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sluice.errors import SluiceError
from sluice.gateway.calls import ending_with_key
from sluice.gateway.http.errors import as_sluice_error
from sluice.gateway.http.request import DETACHED, Detached, run_while_connected
from sluice.pipelines.llm.waking import held_listener
from sluice.pipelines.text.relay import RelayedEvents, Sink

DONE = b"data: [DONE]\n\n"
"""Last event of every stream that is whole."""
PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for the text in a payload."""

PIECE_WRITER = "sluice.piece_writer"
"""Key of the ASGI scope's extension with a `WritePiece` for the response once its first piece is sent: every layer of
the application that a piece passes on its way to the server costs as much as making it, and looks only at the first."""

DIRECT_WRITER = "sluice.direct_writer"
"""Key of the ASGI scope's extension with a `DirectWriter` for the same response, where there is one."""

WritePiece = Callable[[bytes], Awaitable[None]]
EncodeError = Callable[[SluiceError], bytes]
"""Makes a protocol's final frame for a stream that failed."""


class DirectWriter(Protocol):
    """Writes pieces of a response that has begun, at once."""

    def is_open(self) -> bool:
        """Whether the client reads what was written so far, and is still there."""
        ...

    def write_now(self, piece: bytes) -> None:
        """Write a piece, after a look at `is_open`; nothing where it is empty."""
        ...


encode_text = msgspec.json.Encoder().encode
"""Encodes text as a JSON string in about 50 ns; orjson takes 75."""


class EventStreamResponse(Response):
    """Streams `frames`, which are complete SSE events (`data: ...` with its blank line), as bytes.

    The first frame is awaited before the status goes out, so that a failure up to there is raised and becomes an
    ordinary HTTP error; not for as long as an engine may take to start (`EarlyStart`). A later one is written as
    `encode_error(error)`, and nothing after it: whatever the protocol ends a clean stream with is the last of `frames`.
    So does the end of the sender's key.
    When the client disconnects, also while the first frame is awaited, `frames` is closed at once. Once the status is
    out, `keep_alive_frame` keeps the silence between frames under `keep_alive_s`.
    """

    media_type = "text/event-stream"
    keep_alive_frame = b": keep-alive\n\n"
    """A comment, which clients ignore."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        encode_error: EncodeError,
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive_s: float = 0.0,
    ) -> None:
        """`keep_alive_s` 0: nothing is sent between frames."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._frames = frames
        self._encode_error = encode_error
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            with suppress(ClientDisconnect):  # nobody is left to answer
                await run_while_connected(receive, self._stream(scope, send))

    async def _stream(self, scope: Scope, send: Send) -> None:
        detached: Detached | None = scope.get(DETACHED)
        # Readers of an answer that is kept have silences of their own.
        keep_alive_s = self._keep_alive_s if detached is None else 0.0
        begin: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        early = EarlyStart(send, begin, self.keep_alive_frame, keep_alive_s)
        try:
            with ending_with_key():
                first = await early.wait(anext(self._frames, b""))
        except Exception as error:
            if not early.has_begun:
                raise
            last = self._encode_error(as_sluice_error(error, scope["state"]["request_id"]))
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        if not early.has_begun:
            await send(begin)
        silence = SilenceBreaker(send, self.keep_alive_frame, keep_alive_s)
        try:
            with ending_with_key():
                await send({"type": "http.response.body", "body": first, "more_body": True})
                write = find_piece_writer(scope, send)
                self._relay(scope, silence)
                async for frame in self._frames:
                    await write(frame)
                    silence.num_sent += 1
            last = b""
        except Exception as error:
            await self._frames.aclose()  # nothing goes straight to the connection after the last frame
            failure = as_sluice_error(error, scope["state"]["request_id"])
            last = self._encode_error(failure)
            if detached is not None:
                detached.note_failure(failure)
        finally:
            silence.end()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _relay(self, scope: Scope, silence: "SilenceBreaker") -> None:
        """Let frames that can go straight to the connection do so; the others come as before."""
        writer: DirectWriter | None = scope.get("extensions", {}).get(DIRECT_WRITER)
        if writer is None or not isinstance(self._frames, RelayedEvents):
            return
        write_now = writer.write_now

        def receive(frame: bytes) -> None:
            write_now(frame)
            silence.num_sent += 1

        self._frames.divert(Sink(receive, writer.is_open))


def find_piece_writer(scope: Scope, send: Send) -> WritePiece:
    """Return the server's own writer of pieces, where it has one for this response, whose first piece was sent."""

    async def write(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    direct: WritePiece | None = scope.get("extensions", {}).get(PIECE_WRITER)
    return write if direct is None else direct


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


class EarlyStart:
    """Begins the answer to a request that waits for an engine to start, so that no proxy takes it for dead. The answer
    to any other begins with its first event, whose error has a status of its own."""

    def __init__(self, send: Send, begin: Message, frame: bytes, longest_s: float) -> None:
        """After half of `longest_s` the message `begin` is sent, then `frame` time and again. 0: never."""
        self.has_begun = False
        self._send = send
        self._begin = begin
        self._frame = frame
        self._longest_s = longest_s
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[SilenceBreaker] | None = None

    async def wait(self, first: Awaitable[bytes]) -> bytes:
        """Return the first event. Raises its error."""
        token = held_listener.set(self._note_held if self._longest_s else None)
        try:
            return await first
        finally:
            held_listener.reset(token)
            if self._timer is not None:
                self._timer.cancel()
            if self._sending is not None:
                (await self._sending).end()

    def _note_held(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._longest_s / 2, self._start)

    def _start(self) -> None:
        self.has_begun = True
        self._sending = asyncio.ensure_future(self._send_beginning())

    async def _send_beginning(self) -> "SilenceBreaker":
        await self._send(self._begin)
        await self._send({"type": "http.response.body", "body": self._frame, "more_body": True})
        return SilenceBreaker(self._send, self._frame, self._longest_s)


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
