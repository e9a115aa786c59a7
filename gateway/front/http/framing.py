"""Requests out of the ordinary: heads that are refused, and answers that uvicorn would not frame as HTTP asks for."""

from http import HTTPStatus

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from sluice.gateway.front.http.errors import broken_request_body

HTTP2_PREFACE = "HTTP/2 by prior knowledge is not served here, send HTTP/1.1"
_VERSIONS = ("1.0", "1.1")
_SHOWN_BYTES = 80
_REFUSAL = (
    "HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    "{allow}connection: close\r\nx-request-id: {request_id}\r\n\r\n"
)
_ALLOW = "allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"


class FaultError(Exception):
    """A request is not what HTTP asks for, or more than is read."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def check_odd_head(method: bytes, url: bytes, version: str, hosts: tuple[bytes, ...], coding: bytes) -> bytes:
    """Return what a request is for. Raises FaultError for a head that must not be answered as it asks (RFC 9112).

    `hosts` has the values of its Host headers. `coding` is a Transfer-Encoding that is not ours, b"" for none.
    """
    if version not in _VERSIONS:
        text = f"the request's version is HTTP/{version}; HTTP/1.1 and HTTP/1.0 are served here"
        raise FaultError(text, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if method == b"CONNECT":
        raise FaultError("method CONNECT is not allowed: this server is no proxy", HTTPStatus.METHOD_NOT_ALLOWED)
    if len(hosts) > 1:
        raise FaultError(f"the request must have one Host header, got {len(hosts)}")
    if not hosts and version != "1.0":
        raise FaultError("an HTTP/1.1 request must have a Host header, got none")
    if coding:
        raise FaultError(f"transfer-encoding must be chunked, got {shown(coding)}", HTTPStatus.NOT_IMPLEMENTED)
    return _find_path(url)


def _find_path(url: bytes) -> bytes:
    """Return the target of a request; of a whole URL without a path that is "/"."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise FaultError(f"the request's target must be a path or a URL, got {shown(url)}") from None
    if parsed.path is not None:
        return url
    return b"/" if parsed.query is None else b"/?" + parsed.query


def shown(value: bytes) -> str:
    """Return a value of a head as a message quotes it."""
    return repr(value[:_SHOWN_BYTES].decode("latin-1"))


def refusal(url: bytes, status: HTTPStatus, message: str, request_id: str) -> bytes:
    """Return the answer to a request that is not read, after which the connection ends."""
    body = broken_request_body(url.decode("latin-1"), status, message)
    allow = _ALLOW if status == HTTPStatus.METHOD_NOT_ALLOWED else ""
    return _REFUSAL.format(status=status, length=len(body), allow=allow, request_id=request_id).encode() + body


def framed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return `app` for a request that is not plain (`is_plain`).

    HEAD is answered as GET is, without the body. An answer of unknown length to HTTP/1.0 ends with the connection, as
    does one to a client whose body was never asked for: whether it sends that now is not known.
    """
    is_head, is_old = cycle.scope["method"] == "HEAD", cycle.scope["http_version"] == "1.0"
    if is_old:
        cycle.waiting_for_100_continue = False  # the client would take 100 for the answer

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        ends_with_connection = False

        async def send_framed(message: Message) -> None:
            nonlocal ends_with_connection
            if message["type"] == "http.response.start":
                if is_old and not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                    ends_with_connection, cycle.chunked_encoding = True, False
                if cycle.waiting_for_100_continue and cycle.more_body:
                    cycle.keep_alive = False
                await send(message)
                if is_head:  # also of a stream without end
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not is_head:
                if ends_with_connection:  # uvicorn compares a piece with what is still to come
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

        await app({**scope, "method": "GET"} if is_head else scope, receive, send_framed)

    return serve
