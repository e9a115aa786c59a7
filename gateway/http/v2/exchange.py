"""One request and its answer, straight over ASGI."""

from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"
BINARY = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"


class Exchange:
    """What came, and how to answer it. `headers` by lower-case name; of equal ones the last."""

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
        """A header's text; "" where it is absent."""
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else ""

    @property
    def request_id(self) -> str:
        """The id that the middleware gave to the request; the log has it."""
        request_id: str = self.scope.get("state", {}).get("request_id", "-")
        return request_id

    async def start(self, status: int, content_type: bytes, more: Headers = ()) -> None:
        """Send the head of a response whose pieces follow."""
        self.has_started = True
        headers = [(b"content-type", content_type), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """Send one chunk."""
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """Send the end of a response that was begun with `start`."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, status: int, body: bytes = b"", content_type: bytes = JSON, more: Headers = ()) -> None:
        """Send a whole response."""
        self.has_started = True
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
