"""An HTTP server that answers as the test says, well or badly, and tells what it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.http.server import HttpServer
from gateway.listeners import listen, listener_url

PATIENCE_S = 30.0


@dataclass
class Exchange:
    """One request, and the way to answer it."""

    path: str
    headers: dict[str, str]
    body: Any
    _receive: Receive
    _send: Send

    async def reply(self, payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer: bytes as they are, anything else as JSON."""
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
        """A whole stream, with its end."""
        await self.begin()
        for each in events:
            await self.event(each)
        await self.event(b"[DONE]")
        await self.end()

    async def disconnected(self) -> None:
        """Until the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


Answer = Callable[[Exchange], Awaitable[None]]


class RemoteApi:
    """Set `answer` before it is asked. One that returns without an end drops the connection."""

    def __init__(self) -> None:
        self.url = ""
        self.answer: Answer = _unset
        self.asked: list[Exchange] = []

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.asked]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        exchange = Exchange(scope["path"], headers, json.loads(raw) if raw else None, receive, send)
        self.asked.append(exchange)
        await self.answer(exchange)


async def _unset(exchange: Exchange) -> None:
    raise AssertionError(f"nobody said how to answer {exchange.path}")


@asynccontextmanager
async def remote_api() -> AsyncIterator[RemoteApi]:
    """On a free port, on the test's own loop."""
    api, listener = RemoteApi(), listen("127.0.0.1", 0, "--http-port")
    api.url = f"{listener_url(listener)}/v1"
    server = HttpServer(api, listener)
    server.start()
    try:
        yield api
    finally:
        await server.stop(0)
        listener.close()


def said(text: str | None, finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
    """A chunk of a chat's stream."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}], **extra}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The last chunk of a stream."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": counts}


def whole(text: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """The answer to a chat that does not stream."""
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


class Held:
    """Answers nothing until it is released; tells how many wait and that one has left."""

    def __init__(self, then: Answer) -> None:
        self._then = then
        self._released = asyncio.Event()
        self._changed = asyncio.Condition()
        self.num_come = 0
        self.num_left = 0

    async def __call__(self, exchange: Exchange) -> None:
        await self._note(come=1)
        leaving, released = (
            asyncio.create_task(exchange.disconnected()),
            asyncio.create_task(self._released.wait()),
        )
        await asyncio.wait((leaving, released), return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, released):
            task.cancel()
        if leaving.done() and not self._released.is_set():
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
