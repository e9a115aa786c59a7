"""The response to one who reads a kept stream, from its beginning or from where he was cut."""

from contextlib import aclosing, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import Head, Headers, KeptStream, StreamMovedError
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.http.errors import anthropic_error_body, as_sluice_error, is_anthropic, openai_error_body
from sluice.gateway.front.http.request import run_while_connected
from sluice.gateway.front.http.sse import EventStreamResponse, SilenceBreaker, find_piece_writer

STREAM_HEADER = b"x-sluice-stream"
REPLAYED_HEADER = b"idempotent-replayed"


class KeptResponse(Response):
    """Sends a kept stream's status and headers, and its pieces from number `start` on as they come.

    Raises SluiceError where the stream ends before its head, or as `EventLog.check`.
    """

    def __init__(
        self,
        kept: KeptStream,
        start: int,
        keep_alive_s: float,
        headers: Headers | None = None,
        *,
        num_takeovers: int | None = None,
    ) -> None:
        """The reader has `start` pieces, the last of which was sent after `num_takeovers`; None: that is not known."""
        self.status_code = 200
        self.background = None
        self._kept = kept
        self._start = start
        self._num_takeovers = num_takeovers
        self._keep_alive_s = keep_alive_s
        self._own_headers = headers or []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._kept.reading(), suppress(ClientDisconnect):
            await run_while_connected(receive, self._stream(scope, send))

    async def _stream(self, scope: Scope, send: Send) -> None:
        kept = self._kept
        head = await kept.wait_head()
        if head is None:
            raise kept.failure or SluiceError(ErrorCode.CANCELLED, f"stream {kept.id} was cancelled before its answer")
        start = self._start if head.is_event_stream else 0
        kept.log.check(start, self._num_takeovers)
        await send({"type": "http.response.start", "status": head.status, "headers": self._all_headers(head)})
        await self._write_pieces(start, scope, send, head)

    def _all_headers(self, head: Head) -> Headers:
        own = [(STREAM_HEADER, self._kept.id.encode())] if self._kept.origin.is_resumable else []
        return [*head.headers, *own, *self._own_headers]

    async def _write_pieces(self, start: int, scope: Scope, send: Send, head: Head) -> None:
        keep_alive_s = self._keep_alive_s if head.is_event_stream else 0.0
        silence = SilenceBreaker(send, EventStreamResponse.keep_alive_frame, keep_alive_s)
        last = b""
        try:
            with ending_with_key():
                await self._follow(start, scope, send, silence)
            if self._kept.failure is not None:
                raise self._kept.failure
        except Exception as error:
            if isinstance(error, StreamMovedError) or not head.is_event_stream:
                return  # the server closes the connection, so that nothing looks complete
            last = error_event(self._kept.origin.path, as_sluice_error(error, scope["state"]["request_id"]))
        finally:
            silence.end()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _follow(self, start: int, scope: Scope, send: Send, silence: SilenceBreaker) -> None:
        write = find_piece_writer(scope, send)
        async with aclosing(self._kept.log.follow(start, self._num_takeovers)) as pieces:
            first = await anext(pieces, b"")  # the server's own writer is for those that follow
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await write(piece)
                silence.num_sent += 1


def error_event(path: str, error: SluiceError) -> bytes:
    """Return the last event of a stream that broke, in the shape of the protocol that `path` belongs to."""
    if is_anthropic(path):
        return b"event: error\ndata: " + anthropic_error_body(error) + b"\n\n"
    return b"data: " + openai_error_body(error) + b"\n\n"
