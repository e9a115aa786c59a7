"""A minimal HTTP/1.1 client: it sends a request and passes on the response's bytes the moment they arrive.

The buffers, queues and wake-ups of a general client cost more per token than the measurement itself, and the client
shares its cores with the server. At 64 streams a token event took 14 us of CPU through aiohttp, 70 us through httpx and
7 us here.
"""

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from sluice.load.config import LoadConfig, LoadConfigError, LoadTarget

MAX_IDLE_S = 2.0
"""Connections that were idle for longer are not used again: servers drop them (uvicorn after 5 s)."""


class ResponseReceiver(ABC):
    """Receives a response. Its methods are called in the event loop's read callback and must be quick."""

    __slots__ = ()

    @abstractmethod
    def on_status(self, status: int) -> None: ...

    @abstractmethod
    def on_body(self, piece: bytes, at: float) -> None:
        """Receive a piece of the body. `at` is when it was read from the socket, by the pool's clock."""


class HttpConnection(asyncio.Protocol):
    """A keep-alive connection with one exchange at a time. httptools calls the `on_*` methods."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._transport: asyncio.Transport | None = None
        self._read_at = 0.0
        self._receiver: ResponseReceiver | None = None
        self._finished: asyncio.Future[None] | None = None
        self._is_framed = False
        self._has_headers = False
        self.is_reusable = True

    async def exchange(self, request: bytes, receiver: ResponseReceiver) -> None:
        """Send `request`, pass the response to `receiver`, and return when it is complete.

        Raises `ConnectionError` where the connection ends first. Cancellation drops the connection.
        """
        assert self._transport is not None, "exchange before the connection was made"
        self._parser = httptools.HttpResponseParser(self)
        self._receiver = receiver
        self._is_framed = self._has_headers = False
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._finished
        except BaseException:
            self.close()
            raise
        finally:
            self._finished = self._receiver = None

    def close(self) -> None:
        """Drop the connection at once."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._finished is None:
            self.close()
            return
        self._read_at = self._now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # the receiver's fault, not the server's
            self._fail(error)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the server does not speak HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if error is None and self._has_headers and not self._is_framed:
            self.on_message_complete()
            return
        self._fail(ConnectionError(str(error) if error else "the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        assert self._receiver is not None
        self._has_headers = True
        self._receiver.on_status(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        assert self._receiver is not None
        self._receiver.on_body(piece, self._read_at)

    def on_message_complete(self) -> None:
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.is_reusable = False
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)


@dataclass(slots=True)
class ConnectionPool:
    """Connections to one server. It opens as many as are in use at once, and keeps idle ones for a moment."""

    url: str
    now: Callable[[], float]
    _idle: list[tuple[HttpConnection, float]] = field(default_factory=list)
    _host: str = field(init=False)
    _port: int = field(init=False)
    _tls: ssl.SSLContext | None = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadConfigError(f"url {self.url!r}: write it as http://host:port or https://host:port")
        if parts.username is not None:
            raise LoadConfigError("url: send credentials by --api-key or --header, not in the url")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)

    async def acquire(self) -> HttpConnection:
        """Return an open connection for the caller alone until `release`. Raises `OSError` where none can be made."""
        while self._idle:
            connection, idle_since = self._idle.pop()
            if connection.is_reusable and self.now() - idle_since < MAX_IDLE_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: HttpConnection(self.now), self._host, self._port, ssl=self._tls
        )
        return connection

    def release(self, connection: HttpConnection) -> None:
        """Return a connection to the pool after an exchange, however that ended."""
        if connection.is_reusable:
            self._idle.append((connection, self.now()))
        else:
            connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()


def encode_request(method: str, url: str, path: str, headers: tuple[tuple[str, str], ...], body: bytes = b"") -> bytes:
    """Encode a request. `path` is appended to the path of `url`."""
    parts = urlsplit(url)
    lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body:
        lines.append("Content-Type: application/json")
    lines += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


T = TypeVar("T")


class RunError(Exception):
    """The run could not begin. The message is for the user.

    `is_refusal` tells a server that answered with another status than 200 from one that cannot be reached.
    """

    def __init__(self, message: str, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


@dataclass(slots=True)
class _CollectedResponse(ResponseReceiver):
    """Collects a response."""

    status: int = 0
    body: bytes = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes, at: float) -> None:
        self.body += piece


async def get(pool: ConnectionPool, target: LoadTarget, path: str) -> bytes:
    """Get a path of the server. Raises RunError where it cannot be reached or does not answer 200."""
    response = _CollectedResponse()
    try:
        async with asyncio.timeout(target.timeout_s):
            connection = await pool.acquire()
            try:
                await connection.exchange(encode_request("GET", target.url, path, target.headers), response)
            finally:
                pool.release(connection)
    except (OSError, TimeoutError) as error:
        raise RunError(f"cannot reach {target.url}: {error}") from error
    if response.status != 200:
        answer = response.body[:200].decode(errors="replace")
        raise RunError(f"{target.url}{path} answers {response.status} ({answer})", is_refusal=True)
    return response.body


async def get_json(pool: ConnectionPool, config: LoadConfig, path: str, kind: type[T]) -> T:
    """Get JSON of a type. Raises RunError also for an answer that is none."""
    try:
        return msgspec.json.decode(await get(pool, config.target, path), type=kind)
    except msgspec.DecodeError as error:
        raise RunError(f"{config.target.url}{path}: {error}", is_refusal=True) from None
