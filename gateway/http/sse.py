"""Server-sent events: one frame an event, one write a frame, ended at once when the client leaves."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.disconnect import run_while_connected
from gateway.http.errors import as_sluice_error
from sluice.errors import SluiceError

EncodeError = Callable[[SluiceError], bytes]
"""A protocol's final frame for a stream that failed."""


class EventStreamResponse(Response):
    """Streams `frames`, which are complete SSE events (`data: ...` with its blank line), as bytes.

    The first frame is awaited before the status goes out, so that a failure up to there is raised
    and becomes an ordinary HTTP error. A later one is written as `encode_error(error)`, and nothing
    after it: whatever the protocol ends a clean stream with is the last of `frames`. When the client
    disconnects, also while the first frame is awaited, `frames` is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes, None], encode_error: EncodeError, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._frames = frames
        self._encode_error = encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            with suppress(ClientDisconnect):  # nobody is left to answer
                await run_while_connected(receive, self._stream(scope, send))

    async def _stream(self, scope: Scope, send: Send) -> None:
        first = await anext(self._frames, b"")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            last = b""
        except Exception as error:
            last = self._encode_error(as_sluice_error(error, scope["state"]["request_id"]))
        await send({"type": "http.response.body", "body": last, "more_body": False})
