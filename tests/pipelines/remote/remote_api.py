"""An HTTP server that answers as a test says, well or badly, and keeps the requests it got."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from tests.waiting import PATIENCE_S

_TURNS_TO_CLOSE = 10
"""Turns of the loop in which a server closes its listener and its connections."""


@dataclass
class Exchange:
    """One request, and the way to answer it."""

    path: str
    headers: dict[str, str]
    body: Any
    _receive: Receive
    _send: Send

    async def reply(self, payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send the whole answer: bytes as they are, anything else as JSON."""
        await self.begin(status, "application/json", headers)
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self._send({"type": "http.response.body", "body": raw})

    async def begin(
        self, status: int = 200, content_type: str = "text/event-stream", headers: Mapping[str, str] | None = None
    ) -> None:
        given = {"content-type": content_type, **(headers or {})}
        listed = [(name.encode(), value.encode()) for name, value in given.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def event(self, payload: Any) -> None:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self._send({"type": "http.response.body", "body": b"data: " + raw + b"\n\n", "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def stream(self, *events: Any) -> None:
        """Send a whole stream, with its end."""
        await self.begin()
        for each in events:
            await self.event(each)
        await self.event(b"[DONE]")
        await self.end()

    async def disconnected(self) -> None:
        """Wait until the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


Answer = Callable[[Exchange], Awaitable[None]]


class RemoteApi:
    """A server that answers with `answer`. An answer that returns without an end drops the connection."""

    def __init__(self) -> None:
        self.url = ""
        self.answer: Answer = _unset
        self.exchanges: list[Exchange] = []

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.exchanges]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        exchange = Exchange(scope["path"], headers, json.loads(raw) if raw else None, receive, send)
        self.exchanges.append(exchange)
        await self.answer(exchange)


async def _unset(exchange: Exchange) -> None:
    raise AssertionError(f"no answer is set for {exchange.path}")


@asynccontextmanager
async def remote_api() -> AsyncIterator[RemoteApi]:
    """Serve on a free port, on the test's own loop."""
    api, listener = RemoteApi(), listen("127.0.0.1", 0, "--http-port")
    api.url = f"{listener_url(listener)}/v1"
    server = HttpServer(api, listener)
    server.start()
    try:
        yield api
    finally:
        server.begin_stop()
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)
        server.task.cancel()  # uvicorn waits for a tenth of a second when all is closed
        await asyncio.wait((server.task,))
        listener.close()


def chunk(text: str | None, finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
    """Return a chunk of a chat's stream."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}], **extra}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """Return the last chunk of a stream."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": counts}


def whole(text: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """Return the answer to a chat that does not stream."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def replying(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(payload, status, headers)

    return answer


def streaming(*events: Any) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.stream(*events)

    return answer


class UnfinishedAnswer:
    """Answers with the first chunk of a stream, and waits until the client has disconnected."""

    def __init__(self, first: dict[str, Any]) -> None:
        self._first = first
        self.disconnected = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(self._first)
        await exchange.disconnected()
        self.disconnected.set()


class HeldAnswer:
    """Answers nothing until it is released; counts requests and clients that disconnected."""

    def __init__(self, then: Answer) -> None:
        self._then = then
        self._released = asyncio.Event()
        self._changed = asyncio.Condition()
        self.num_come = 0
        self.num_left = 0

    async def __call__(self, exchange: Exchange) -> None:
        await self._note(come=1)
        disconnected, released = (
            asyncio.create_task(exchange.disconnected()),
            asyncio.create_task(self._released.wait()),
        )
        await asyncio.wait((disconnected, released), return_when=asyncio.FIRST_COMPLETED)
        for task in (disconnected, released):
            task.cancel()
        if disconnected.done() and not self._released.is_set():
            await self._note(left=1)
            return
        await self._then(exchange)

    async def _note(self, *, come: int = 0, left: int = 0) -> None:
        async with self._changed:
            self.num_come += come
            self.num_left += left
            self._changed.notify_all()

    def release(self) -> None:
        self._released.set()

    async def wait(self, *, come: int = 0, left: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.num_come >= come and self.num_left >= left)
