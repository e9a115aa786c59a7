"""A request as every HTTP route reads it: its id, its body, its client's connection and its scheduling headers."""

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, TypedDict, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import Receive

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.calls import allowed_priority, current_call, note_session
from sluice.gateway.front.http.content_coding import ENCODING, is_packed, unpack_pieces
from sluice.gateway.front.http.errors import (
    QUEUE_TIMEOUT_HEADER,
    TIMEOUT_HEADER,
    body_too_large,
)
from sluice.gateway.front.long_work import LONG_BYTES, trim_later
from sluice.gateway.options.http import RequestOptions
from sluice.gateway.plane.models import NO_SESSION, STICKY_HEADER, Session, find_session
from sluice.gateway.tenancy.access.control import TENANT_HEADER, check_tenant
from sluice.gateway.tenancy.access.ring import SERVER_KEY
from sluice.record.spans import RemoteParent, parse_traceparent

T = TypeVar("T")

_ID_HEADER = b"x-request-id"
_REPEATABLE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
_PROCESS_MARK = secrets.token_hex(7)
_NUMBERS = itertools.count(secrets.randbits(32))
"""Ids are numbers behind this process's own mark: a random one for each request costs more than parsing its head."""


def choose_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's id where it is safe to repeat in a header and a log line, else a new one."""
    for name, value in headers:
        if name == _ID_HEADER:
            sent = value.decode("latin-1")
            if _REPEATABLE_ID.fullmatch(sent):
                return sent
            break
    return f"{_PROCESS_MARK}{next(_NUMBERS):010x}"


def find_parent(headers: Iterable[tuple[bytes, bytes]]) -> RemoteParent | None:
    """Return the span that the client's `traceparent` names; None without one."""
    for name, value in headers:
        if name == b"traceparent":
            state = next((text for key, text in headers if key == b"tracestate"), b"")
            return parse_traceparent(value.decode("latin-1"), state.decode("latin-1"))
    return None


def get_request_id(request: HTTPConnection) -> str:
    """Return the id that the middleware gave to `request`."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


DETACHED = "sluice.detached"
"""Key of the ASGI scope of a request that is answered apart from its client's connection, with a `Detached`."""


class Detached(Protocol):
    """Answers a request independently of the client's connection. `began_at` is in seconds since 1970."""

    began_at: float

    def note_failure(self, error: SluiceError) -> None:
        """Note that the answer ends in an error that its status does not tell."""
        ...


def get_begin_time(request: HTTPConnection) -> float:
    """Return when `request` began, in seconds since 1970: one that another server began, began there."""
    detached: Detached | None = request.scope.get(DETACHED)
    return time.time() if detached is None else detached.began_at


BODY_TIMEOUT_S = 60.0
"""Longest silence within a body: a client that stops half way must not hold its connection for ever."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read the whole body. Raises as `read_pieces`."""
    body = bytearray()
    async with aclosing(read_pieces(request, limit_bytes)) as pieces:
        async for piece in pieces:
            body += piece
    return bytes(body)


def read_pieces(request: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """Return the pieces of the body as they arrive, without its Content-Encoding.

    Raises UnknownEncodingError; INVALID for a body that is not encoded as it says; TOO_LARGE as soon as it is known to
    exceed `limit_bytes` (from its Content-Length, or while pieces arrive); DEADLINE where the client stops sending; and
    ClientDisconnect where it disconnects.
    """
    pieces, headers = _arriving_pieces(request, limit_bytes), request.scope["headers"]
    if any(name == ENCODING for name, _ in headers) and is_packed(headers):
        return unpack_pieces(pieces, limit_bytes)
    return pieces


async def _arriving_pieces(request: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    declared = int(request.headers.get("content-length", 0))
    if declared > limit_bytes:
        raise body_too_large(f"is {declared} bytes", limit_bytes)
    num_bytes, more_body = 0, True
    while more_body:
        piece, more_body = await next_piece(request.receive)
        num_bytes += len(piece)
        if num_bytes > limit_bytes:
            raise body_too_large("is longer", limit_bytes)
        yield piece
    if num_bytes >= LONG_BYTES:
        trim_later()


async def next_piece(receive: Receive) -> tuple[bytes, bool]:
    """Return the next piece of a body, and whether more follows. Raises ClientDisconnect, and DEADLINE where the client
    stops sending."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            message = await receive()
    except TimeoutError:
        text = f"the request's body stopped arriving for {BODY_TIMEOUT_S:.0f} s"
        raise SluiceError(ErrorCode.DEADLINE, text) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def run_while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Return the result of `work`, which is cancelled at once when the client disconnects.

    The request's body must have been read. Raises what `work` raises, and ClientDisconnect where the client
    disconnected first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        await _end(task)


async def run_in_time(request: Request, defaults: RequestOptions, work: Coroutine[None, None, T]) -> T:
    """Return and raise as `run_while_connected`, and raise DEADLINE where `work` takes longer than the request's
    scheduling headers, else `defaults`, allow."""
    try:
        timeout_s = parse_scheduling(request.headers, defaults).fields(None)["timeout_s"]
    except SluiceError:
        work.close()
        raise
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await run_while_connected(request.receive, work)
    except TimeoutError:
        if not limit.expired():
            raise
        raise SluiceError(ErrorCode.DEADLINE, f"the request was not answered within {timeout_s} s") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel `task` and let its clean-up run, so that the engine has its blocks back when this returns."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    elif not task.cancelled():
        task.exception()  # nobody else may ask for it: the client's deadline came in the same turn


PRIORITY_HEADER = "x-sluice-priority"

MAX_TIMEOUT_S = 1e7
"""Longest timeout that a header may set, about four months."""
_PRIORITIES = range(-(2**31), 2**31)

SCHEDULING_PARAMETERS: list[dict[str, Any]] = [
    {"name": name, "in": "header", "schema": {"type": kind}, "description": description}
    for name, kind, description in (
        (TENANT_HEADER, "string", "Whom served tokens are charged to: tenants share the engine by their weights."),
        (PRIORITY_HEADER, "integer", "Lower runs earlier. Wins over the body's priority."),
        (TIMEOUT_HEADER, "integer", "Milliseconds from arrival to the last token; then the request ends in 504."),
        (QUEUE_TIMEOUT_HEADER, "integer", "Milliseconds from arrival to admission; then the request ends in 504."),
        (
            STICKY_HEADER,
            "string",
            "Requests with the same text get the same version of a model whose versions share them.",
        ),
    )
]
"""Descriptions of the headers for /docs."""


class SchedulingFields(TypedDict):
    """Fields of a TextRequest."""

    tenant: str
    session: str
    parent_session: str
    priority: int
    timeout_s: float | None
    queue_timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Values of the headers, None for absent ones, and `defaults` for what neither headers nor body say."""

    defaults: RequestOptions
    tenant: str = ""
    priority: int | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    sticky_key: str = ""
    session: Session = NO_SESSION
    """The session that headers name, also the one of the sticky key."""

    def fields(
        self, priority: int | None, timeout_s: float | None = None, session: str | None = None
    ) -> SchedulingFields:
        """Combine the headers with the body's values. A header wins: a proxy that knows the client may have set it. The
        current call notes the session."""
        name, parent = self.session if self.session.id else (session or "", "")
        note_session(name, parent)
        return {
            "tenant": self.tenant,
            "session": name,
            "parent_session": parent,
            "priority": _choose_priority(_first(self.priority, priority)),
            "timeout_s": _first(self.timeout_s, timeout_s, self.defaults.timeout_s),
            "queue_timeout_s": _first(self.queue_timeout_s, self.defaults.queue_timeout_s),
        }


def parse_scheduling(headers: Mapping[str, str], defaults: RequestOptions) -> Scheduling:
    """Parse the scheduling headers among `headers`. Raises INVALID, naming the header."""
    return Scheduling(
        defaults,
        tenant=tenant_of(headers),
        priority=_parse_priority(headers.get(PRIORITY_HEADER)),
        timeout_s=_parse_seconds(headers, TIMEOUT_HEADER),
        queue_timeout_s=_parse_seconds(headers, QUEUE_TIMEOUT_HEADER),
        sticky_key=headers.get(STICKY_HEADER, ""),
        session=find_session(headers, defaults.session_headers),
    )


def owner_of(headers: Mapping[str, str]) -> str:
    """Return who owns what a request stores: its key's tenant, or else its key, whichever text the key has now; without
    keys of its own its tenant with what it sends as a key. Neither can be read from the name. Raises INVALID for a
    tenant that is none."""
    call = current_call.get()
    tenant, identity = tenant_of(headers), None if call is None else call.identity
    if identity is None or identity is SERVER_KEY:
        owner = f"{tenant}\0{headers.get('authorization') or headers.get('x-api-key', '')}"
    else:
        is_own = not tenant or (not identity.tenant and tenant == identity.name)
        owner = f"key\0{identity.key_id}" if is_own else f"tenant\0{tenant}"
    return sha256(owner.encode()).hexdigest()


def tenant_of(headers: Mapping[str, str]) -> str:
    """Return whom a request's tokens are charged to. Raises INVALID for a tenant that is none."""
    call = current_call.get()
    if call is not None:
        return call.tenant
    tenant = headers.get(TENANT_HEADER, "")
    return check_tenant(tenant) if tenant else ""


def _choose_priority(priority: int | None) -> int:
    return (priority or 0) if current_call.get() is None else allowed_priority(priority)


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _parse_priority(value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"[+-]?\d{1,10}", value, re.ASCII) or int(value) not in _PRIORITIES:
        text = f"{PRIORITY_HEADER} must be a 32-bit integer (lower runs earlier), got {value[:40]!r}"
        raise invalid(PRIORITY_HEADER, text)
    return int(value)


def _parse_seconds(headers: Mapping[str, str], name: str) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,12}", value, re.ASCII) or not 0 < int(value) / 1000 <= MAX_TIMEOUT_S:
        most = int(MAX_TIMEOUT_S * 1000)
        raise invalid(name, f"{name} must be a whole number of milliseconds from 1 to {most}, got {value[:40]!r}")
    return int(value) / 1000
