"""A worker's process: a whole server on the shared port, over the host's engines, until the host wants an end.

`python -m sluice.gateway.workers.worker LISTENER`: the host starts it with this descriptor of the port.
"""

import asyncio
import gc
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.engine.process.process_group import send_at_starters_end
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.wishes import HEADERS
from sluice.gateway.api.v2.server import statistics
from sluice.gateway.assembly import make_application, make_server, measure_process
from sluice.gateway.front.http.exchange import HotRoutes, RawHeaders
from sluice.gateway.front.http.request import BODY_TIMEOUT_S
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.routes import RouteOptions
from sluice.gateway.options.streams import ResumeOptions
from sluice.gateway.options.telemetry import LoggingOptions, TraceOptions
from sluice.gateway.process_settings import favour_event_loop, raise_file_limit
from sluice.gateway.telemetry.logs import configure_logging, current_request_id
from sluice.gateway.workers.counts import read_counts
from sluice.gateway.workers.host import AskedTimelines, Farewell, FoundRequests
from sluice.gateway.workers.models import Linked, Wanted, WorkerModels
from sluice.gateway.workers.private import Peer, PrivateServer
from sluice.gateway.workers.quotas import HostQuotas
from sluice.gateway.workers.slot import HOST, WorkerStart, socket_name
from sluice.heap import settle_objects
from sluice.log_lines import JSON
from sluice.log_relay import LogRelay
from sluice.record.timelines import Timeline
from sluice.serving.repository.settings import ControlMode

log = logging.getLogger("sluice.gateway.workers.worker")  # as the process runs it, `__name__` is another

_FLUSH_S = 2.0
_HOST_LOST = "the server was lost while it answered: send the request again"


OWN_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),
        *("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/classify", "/pooling"),
        *("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/inference/v1/generate"),
        *("/tokenize", "/detokenize", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
)
"""Paths of requests whose body names the model that answers."""
_INFERENCES = frozenset({"infer", "generate", "generate_stream"})
_MODELS, _COLLECTIONS = "/v2/models/", "/v1/rag/"
_RAG_QUESTIONS = frozenset({"query", "search"})
MOST_BYTES = 1 << 20
"""Longer bodies that name their model are the host's, piece by piece."""


class Named(msgspec.Struct):
    """The one field of a body that matters here."""

    model: str = ""


_DECODER = msgspec.json.Decoder(Named)


class Dispatch:
    """Gives each request to the worker's own application or to the host's; hot routes to its own alone."""

    def __init__(self, own: ASGIApp, host: ASGIApp, models: WorkerModels) -> None:
        self._own = own
        self._host = host
        self._models = models
        hot: HotRoutes | None = getattr(own, "hot", None)
        self.hot = None if hot is None else HotRoutes(partial(self._takes, hot), hot.begin)
        """The hot routes of the models here; None where the application has none."""
        self.socket_paths: Collection[str] = getattr(own, "socket_paths", ())

    def _takes(self, own: HotRoutes, url: bytes, headers: RawHeaders) -> bool:
        return own.takes(url, headers) and self._infers(url.decode("ascii"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] != "POST" or any(name in HEADERS for name, _ in scope["headers"]):
            await self._host(scope, receive, send)  # it alone keeps streams
        elif path in OWN_PATHS and _is_short(scope):
            read = await _read(receive)
            body = _whole(read)
            app = self._host if body is None or not self._serves(_name_model(body)) else self._own
            await app(scope, Replay(read, receive), send)
        else:
            is_own = self._infers(path) or self._finds(path)
            await (self._own if is_own else self._host)(scope, receive, send)

    def _serves(self, name: str) -> bool:
        return self._models.serves(name) or self._models.serves(name.partition(":")[0])

    def _infers(self, path: str) -> bool:
        """Return whether a path is one of inference with a model here."""
        if not path.startswith(_MODELS) or not self._models.wanted.takes_v2:
            return False
        match path.removeprefix(_MODELS).split("/"):
            case [name, action] if action in _INFERENCES:
                return self._models.serves(name)
            case [name, "versions", version, action] if action in _INFERENCES:
                return self._models.serves(name, version)
        return False

    def _finds(self, path: str) -> bool:
        """Return whether a path is a question to documents, whatever model its body names."""
        is_question = path.startswith(_COLLECTIONS) and path.removeprefix(_COLLECTIONS).partition("/")[2] in (
            _RAG_QUESTIONS
        )
        return is_question and self._models.wanted.takes_rag and self._models.is_whole


def _is_short(scope: Scope) -> bool:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) <= MOST_BYTES


def _name_model(body: bytes) -> str:
    try:
        return _DECODER.decode(body).model
    except (ValueError, RecursionError):
        return ""  # the host says what is wrong


async def _read(receive: Receive) -> list[Message]:
    """Return a request's messages up to the end of its body, or as many as a short body may have."""
    messages = [await receive()]
    num_bytes = len(messages[0].get("body", b""))
    with suppress(TimeoutError):  # the host refuses a client that stops sending
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while messages[-1].get("more_body", False) and num_bytes <= MOST_BYTES:
                messages.append(await receive())
                num_bytes += len(messages[-1].get("body", b""))
    return messages


def _whole(messages: list[Message]) -> bytes | None:
    """Return the body; None for one that is longer, or whose client has disconnected."""
    last = messages[-1]
    if last["type"] != "http.request" or last.get("more_body", False):
        return None
    return b"".join(each.get("body", b"") for each in messages)


class Replay:
    """Receives what was read before, and then what follows."""

    __slots__ = ("_read", "_receive")

    def __init__(self, read: list[Message], receive: Receive) -> None:
        self._read = read[::-1]
        self._receive = receive

    async def __call__(self) -> Message:
        return self._read.pop() if self._read else await self._receive()


def _own_config(config: ServeConfig, slot: int) -> ServeConfig:
    """Return what of the server's configuration is a worker's: the host says which models it loads, it has no routes,
    keeps no streams, has no settings that clients change, and its request log is its own."""
    ledger, repository = config.ledger, config.repository
    if repository.paths:
        repository = replace(repository, control_mode=ControlMode.EXPLICIT, load=())
    if ledger.request_log is not None:
        path = Path(ledger.request_log)
        ledger = replace(ledger, request_log=str(path.with_stem(f"{path.stem}-worker-{slot}")))
    return replace(
        config,
        repository=repository,
        routes=RouteOptions(),
        streams=ResumeOptions(),
        logging=LoggingOptions(),
        trace=TraceOptions(),
        ledger=ledger,
    )


class Worker:
    """Serves the shared port: what it can by itself, and the rest through the host. Belongs to the event loop."""

    def __init__(self, start: WorkerStart, life_line: int) -> None:
        """`life_line` is a descriptor that ends with the host."""
        self._start = start
        self._config = start.config
        self._life_line = life_line
        self._host = Peer(start.folder / HOST)
        own = _own_config(start.config, start.slot)
        self._server = make_server(own, quotas=HostQuotas(self._host, start.worker), is_worker=True)
        self._models = WorkerModels(self._server, start.config)
        self._app = Dispatch(make_application(self._server, own), self._host, self._models)
        routes = {
            "sync": self._sync,
            "counts": self._count,
            "requests": self._list_requests,
            "sessions": self._list_sessions,
            "timelines": self._find_timelines,
            "statistics": self._read_statistics,
        }
        self._private = PrivateServer(start.folder / socket_name(start.worker), routes)
        self._has_news = asyncio.Event()
        self._is_orphaned = False

    async def run(self, listener: socket.socket) -> None:
        """Serve the port until the host wants an end, or is lost."""
        measure_process(self._server, self._config.metrics, f"worker-{self._start.slot}")
        await self._server.accounts.calls.access.ring.start()
        await self._server.plane.repository.start()
        self._server.plane.health.begin_serving()
        http = HttpServer(self._app, listener)
        http.start()
        self._private.start()
        settle_objects()
        favour_event_loop()
        asyncio.get_running_loop().add_reader(self._life_line, self._note_loss)
        linking = asyncio.create_task(self._models.keep(), name="link-models")
        try:
            while not (self._models.wanted.ends or self._is_orphaned):
                await self._wait_news()
            if not self._is_orphaned:
                await self._drain(http)
            if self._is_orphaned:
                log.error("the host process is gone; this worker ends")
                await self._server.abort_all(SluiceError(ErrorCode.UNAVAILABLE, _HOST_LOST, retry_after_s=1.0))
        finally:
            linking.cancel()
            await http.stop(_FLUSH_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._models.close()
                    await self._server.rooms.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._private.stop(0)
                    last = Farewell(self._start.worker, read_counts(self._server.metrics.registry))
                    await self._host.ask("farewell", last, bool)
            self._host.close()

    async def _wait_news(self) -> None:
        await self._has_news.wait()
        self._has_news.clear()

    def _note_loss(self) -> None:
        """The life line is readable only at its end."""
        asyncio.get_running_loop().remove_reader(self._life_line)
        self._is_orphaned = True
        self._has_news.set()

    async def _drain(self, http: HttpServer) -> None:
        """Take no more connections, and end the open ones when their requests have ended: in time where the server
        ends, and else however long they take. Returns early where the host is lost meanwhile."""
        while not self._is_orphaned:
            refuses = self._models.wanted.refuses
            if refuses:
                self._server.plane.health.begin_drain()
            timeout_s = self._config.shutdown.exit_timeout_s if refuses else inf
            draining = asyncio.create_task(http.drain(timeout_s), name="drain")
            news = asyncio.create_task(self._wait_news(), name="news")
            try:
                await asyncio.wait((draining, news), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (draining, news):
                    task.cancel()
            if not draining.done():
                continue
            if not draining.result():
                num_open = self._server.plane.num_open
                log.warning("%d requests are still open after %g s; ending them", num_open, timeout_s)
                await self._server.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
                await http.drain(_FLUSH_S)
            return

    # --- what the host asks ---

    async def _sync(self, body: bytes) -> Linked:
        wanted, before = msgspec.msgpack.decode(body, type=Wanted), self._models.wanted
        linked = self._models.want(wanted)
        if (wanted.ends, wanted.refuses) != (before.ends, before.refuses):
            self._has_news.set()
        return linked

    async def _count(self, body: bytes) -> object:
        return read_counts(self._server.metrics.registry)

    async def _list_requests(self, body: bytes) -> FoundRequests:
        """Return the open generations; those of the id in the question, where there is one, end first."""
        cancel = msgspec.msgpack.decode(body, type=str)
        num_cancelled = self._server.live.cancel_here(cancel) if cancel else 0
        return FoundRequests(self._server.live.list_here(), num_cancelled)

    async def _list_sessions(self, body: bytes) -> list[Any]:
        return self._server.metrics.sessions.rows()

    async def _find_timelines(self, body: bytes) -> list[Timeline]:
        asked = msgspec.msgpack.decode(body, type=AskedTimelines)
        return self._server.timelines.find_here(asked.request_id, asked.owner)

    async def _read_statistics(self, body: bytes) -> object:
        return statistics(self._server.plane.repository.models())["model_stats"]


async def _run(start: WorkerStart, listener: socket.socket) -> None:
    name = f"worker-{start.slot}"
    current_request_id.set(name)  # in all lines that are about no request
    relay = LogRelay(start.log_socket, name, current_request_id.get) if start.log_socket else None
    options = start.config.logging
    configure_logging(options.lowest_level, is_json=options.time_format == JSON, relay=relay)
    await Worker(start, sys.stdin.fileno()).run(listener)


def main() -> None:
    """Serve until the host says otherwise: signals of a terminal are the host's."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    send_at_starters_end(signal.SIGCONT)  # one that is stopped goes on, and ends without its host
    raise_file_limit()
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(False)
    try:
        start: WorkerStart = pickle.load(sys.stdin.buffer)
    except EOFError:
        return  # the host has ended
    gc.enable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(start, listener))


if __name__ == "__main__":
    main()
