"""One request and its answer, straight over ASGI: what its path names, replies, and errors in Triton's statuses."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.http.errors import HTTP_STATUS, error_headers
from sluice.gateway.path_masking import client_message
from sluice.gateway.v2.server import parse_version
from sluice.serving.tensors.tensor import Buffer

JSON = b"application/json"
BINARY = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"
Headers = Iterable[tuple[bytes, bytes]]
_TRITON_STATUS = dict.fromkeys(
    (ErrorCode.ALREADY_EXISTS, ErrorCode.CANCELLED, ErrorCode.TOO_LARGE, ErrorCode.UNKNOWN), 400
)
"""Statuses where Triton differs from the other protocols. Codes that Triton lacks keep theirs."""
V2_STATUS: dict[ErrorCode, int] = {**HTTP_STATUS, **_TRITON_STATUS}
_PIECE_BYTES = 1 << 20
"""Bytes of a body that are written at once."""
_MAX_VERSION_DIGITS = 4000
"""Digits of a version that are read and repeated in an error: Python refuses to read more than 4300."""


class RequestTarget(NamedTuple):
    """The model and version, or the shared memory region, that a path names, as it spells them. "" where absent."""

    name: str = ""
    version: str = ""

    @property
    def version_number(self) -> int:
        """The version; LATEST where none is named. Raises INVALID for one that exceeds 64 bits."""
        return parse_version(self.version[:_MAX_VERSION_DIGITS])


class Exchange:
    """A request, and the means to answer it. `headers` is by lower-case name; of equal names the last counts."""

    __slots__ = ("has_started", "headers", "method", "path", "receive", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.has_started = False

    def header(self, name: bytes) -> str:
        """Return a header's text; "" where it is absent."""
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else ""

    @property
    def request_id(self) -> str:
        """The id that the middleware gave to the request, as in the log."""
        request_id: str = self.scope.get("state", {}).get("request_id", "-")
        return request_id

    async def start(self, status: int, content_type: bytes, more: Headers = ()) -> None:
        """Send the head of a response whose pieces follow."""
        self.has_started = True
        headers = [(b"content-type", content_type), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """Send the end of a response that was begun with `start`."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, status: int, body: bytes = b"", content_type: bytes = JSON, more: Headers = ()) -> None:
        self.has_started = True
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_pieces(
        self, status: int, pieces: Sequence[Buffer], content_type: bytes = JSON, more: Headers = ()
    ) -> None:
        """Reply like `reply`, writing a long body as fast as the client reads it."""
        if len(pieces) == 1 and isinstance(pieces[0], bytes) and len(pieces[0]) <= _PIECE_BYTES:
            await self.reply(status, pieces[0], content_type, more)
            return
        await self.start(status, content_type, ((b"content-length", b"%d" % sum(map(len, pieces))), *more))
        for piece in pieces:
            for start in range(0, len(piece), _PIECE_BYTES):
                await self.write(bytes(piece[start : start + _PIECE_BYTES]))
        await self.end()


async def reply_error(exchange: Exchange, error: SluiceError) -> None:
    """Answer with `error`, in Triton's status."""
    await exchange.reply(V2_STATUS[error.code], error_json(error), JSON, raw_error_headers(error))


def raw_error_headers(error: SluiceError) -> list[tuple[bytes, bytes]]:
    """Return the headers of the answer to `error`, besides those of its body."""
    return [(name.encode(), value.encode()) for name, value in error_headers(error).items()]


def error_json(error: SluiceError) -> bytes:
    """Return the body for an error. Characters that are no Unicode are replaced."""
    return orjson.dumps({"error": client_message(error).encode("utf-8", "replace").decode()})
