"""A real HTTP server whose every write is scripted, and a clock that only the script advances."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sluice.load.__main__ import command
from sluice.load.callers import Clock
from sluice.load.config import LoadConfig, LoadTarget, RequestPace, TokenRange, Workload
from sluice.load.run import Run, run_load
from sluice.load.stream import Failure


@dataclass
class Wire:
    """One request as the server receives it, with the raw writes of an answer."""

    head: bytes
    body: dict[str, Any]
    index: int
    writer: asyncio.StreamWriter

    async def whole(self, status: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        self.writer.write("\r\n".join(lines).encode() + body)
        await self.writer.drain()

    def start_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def send(self, data: bytes) -> None:
        """Write one HTTP chunk."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, data: object) -> None:
        self.send(b"data: %b\n\n" % (data if isinstance(data, bytes) else json.dumps(data).encode()))

    def token(self, text: str = "a") -> None:
        self.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})

    def usage(self, completion_tokens: int) -> None:
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": completion_tokens}})

    def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def finish(self, completion_tokens: int) -> None:
        """Write what follows the last token of a complete stream."""
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self.usage(completion_tokens)
        self.event(b"[DONE]")
        self.end_stream()

    def reset(self) -> None:
        """Drop the connection with a TCP reset."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Wire], Awaitable[None]]


async def good_stream(wire: Wire) -> None:
    """Send exactly the requested tokens, one an event."""
    wire.start_stream()
    for _ in range(wire.body["max_tokens"]):
        wire.token()
    wire.finish(wire.body["max_tokens"])


async def not_found(wire: Wire) -> None:
    await wire.whole("404 Not Found", b"{}")


@dataclass
class ScriptedServer:
    """Answers every POST by the script; GET /v1/models names one model, other GETs are answered by `get`."""

    script: Script
    get: Script = not_found
    wires: list[Wire] = field(default_factory=list)
    num_connections: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while not writer.is_closing():
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
        body = json.loads(await reader.readexactly(length) or b"{}")
        wire = Wire(head, body, len(self.wires), writer)
        if head.startswith(b"GET /v1/models "):
            await wire.whole("200 OK", b'{"data": [{"id": "first"}, {"id": "second"}]}')
            return
        if head.startswith(b"GET "):
            await self.get(wire)
            return
        self.wires.append(wire)
        await self.script(wire)


@asynccontextmanager
async def serving(script: Script, get: Script = not_found) -> AsyncIterator[ScriptedServer]:
    """Run a scripted server on a free port. Handlers that still wait at the end are cancelled."""
    scripted = ScriptedServer(script, get)
    handlers: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.ensure_future(scripted.serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()


class ManualClock(Clock):
    """A clock that stands still until `advance`. `was_read` is set at every call of `now`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._moved = asyncio.Event()
        self.was_read = asyncio.Event()

    def now(self) -> float:
        self.was_read.set()
        return self._now

    async def sleep_until(self, moment: float) -> None:
        while self._now < moment:
            await self._moved.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._moved.set()
        self._moved = asyncio.Event()

    async def seen(self, write: Callable[[], None]) -> None:
        """Let the server write, and wait until the client has read the bytes."""
        self.was_read.clear()
        write()
        await self.was_read.wait()


def load_config(url: str, **settings: Any) -> LoadConfig:
    """Configure a small run. Each of `settings` goes to the part that has the field."""
    target: dict[str, Any] = {"model": "m", "timeout_s": 30.0}
    workload: dict[str, Any] = {"prompt_tokens": TokenRange(5, 5), "output_tokens": TokenRange(3, 3)}
    pace: dict[str, Any] = {"num_requests": 1}
    if "request_rate" not in settings:
        pace["concurrency"] = 1
    for part, kind in ((target, LoadTarget), (workload, Workload), (pace, RequestPace)):
        part |= {name: value for name, value in settings.items() if name in kind.__dataclass_fields__}
    rest = {name: settings[name] for name in ("slo", "num_processes", "metrics_url") if name in settings}
    return LoadConfig(LoadTarget(url, **target), RequestPace(**pace), Workload(**workload), **rest)


def run_against(script: Script, **settings: Any) -> Run:
    """Run the load generator against a script, in one event loop."""

    async def scenario() -> Run:
        async with serving(script) as server:
            return await run_load(load_config(server.url, **settings))

    return asyncio.run(scenario())


def only_failure(script: Script, **settings: Any) -> Failure:
    """Return the failure of a run with one failed request."""
    (result,) = run_against(script, **settings).results
    assert result.failure is not None
    return result.failure


def command_against(script: Script, *words: str) -> tuple[int, ScriptedServer]:
    """Run `sluice load` with these words; URL stands for the script's, PORT for its port. Returns the exit status."""

    async def scenario() -> tuple[int, ScriptedServer]:
        async with serving(script) as server:
            port = server.url.rpartition(":")[2]
            argv = [word.replace("URL", server.url).replace("PORT", port) for word in words]
            return await asyncio.to_thread(command, argv), server

    return asyncio.run(scenario())
