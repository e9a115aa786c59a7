"""A whole gateway on a thread of the test, over engines whose runner has no model and takes the time that it is told.

Requests are sent by the gateway's own clients over HTTP, and commands look at it by its URL.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp

from sluice.engine.arrays import FloatArray
from sluice.engine.client.base import EngineClient, Replica
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import FleetClient
from sluice.engine.runners.base import StepBatch
from sluice.gateway.api.app import create_metrics_app
from sluice.gateway.assembly import make_application, make_server, measure_process
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import OtherPorts, listen, listener_url
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.server import Server
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.repositories import llm_model
from tests.paths import RILL_TOKENIZER
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")
MODEL = "rill"


class PacedRunner(EchoRunner):
    """An echo that takes time, for each step and for each token."""

    def __init__(self, step_s: float = 0.0, token_s: float = 0.0, num_blocks: int = 256) -> None:
        super().__init__(num_blocks=num_blocks)
        self._step_s = step_s
        self._token_s = token_s

    def compute(self, batch: StepBatch) -> FloatArray:
        time.sleep(self._step_s + self._token_s * len(batch.token_ids))
        return super().compute(batch)


@dataclass
class LiveGateway:
    """A running gateway, and clients of it whose answers come later."""

    url: str
    metrics_url: str
    server: Server
    engines: list[EngineClient]
    _loop: asyncio.AbstractEventLoop
    _client: httpx.Client
    _pool: ThreadPoolExecutor
    is_over: bool = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run on the gateway's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> "Future[httpx.Response]":
        return self._pool.submit(self._client.post, path, json=body, headers=headers)

    def complete(self, prompt: Sequence[int] = (5, 6), max_tokens: int = 8, **fields: Any) -> "Future[httpx.Response]":
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, **fields}
        return self.post("/v1/completions", body)

    def keep_asking(self, num_clients: int, ask: Callable[[], "Future[httpx.Response]"]) -> None:
        """Have clients ask again and again until the gateway ends."""

        def repeat() -> None:
            while not self.is_over:
                try:
                    ask().result(PATIENCE_S)
                except (httpx.HTTPError, RuntimeError):
                    return

        for _ in range(num_clients):
            threading.Thread(target=repeat, daemon=True).start()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Look, on the event loop, until something is so."""

        async def look() -> None:
            await until(lambda: is_so())

        self.run(look())


@contextmanager
def live_gateway(
    folder: Path,
    *runners: PacedRunner,
    engine: EngineConfig | None = None,
    config: ServeConfig | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[LiveGateway]:
    """Serve the model by an engine for each of the runners. What the gateway keeps lies in `folder`."""
    ready, over = threading.Event(), threading.Event()
    started: list[LiveGateway] = []
    given = config or ServeConfig()
    own = replace(given, batches=replace(given.batches, state_path=str(folder / "state")))
    own = replace(own, rag=replace(own.rag, store=str(folder / "rag.sqlite")))

    async def serve() -> None:
        server = make_server(own)
        measure_process(server, own.metrics, "gateway")
        await server.accounts.calls.access.ring.start()
        settings = engine or EngineConfig(model_path="none")
        engines: list[EngineClient] = [InProcessEngineClient(settings, each) for each in runners]
        chosen: Any = engines[0]
        if len(engines) > 1:
            chosen = FleetClient(settings, [Replica(str(number), each) for number, each in enumerate(engines)])
        await chosen.start()
        server.plane.repository.add(llm_model(MODEL, RILL_TOKENIZER, chosen, server.metrics))
        await server.plane.repository.start(own.repository.load)
        server.plane.health.begin_serving()
        listeners = [listen("127.0.0.1", 0, flag) for flag in ("--http-port", "--metrics-port")]
        port = listeners[1].getsockname()[1]
        whole = make_application(server, own, ports=OtherPorts(port))
        apps: list[ASGIApp] = [whole, create_metrics_app(server.metrics, server.accounts.calls)]
        ports = [HttpServer(app, each) for app, each in zip(apps, listeners, strict=True)]
        for http in ports:
            http.start()
        urls = [listener_url(each) for each in listeners]
        with (
            ThreadPoolExecutor(64) as pool,
            httpx.Client(base_url=urls[0], timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as client,
        ):
            loop = asyncio.get_running_loop()
            running = LiveGateway(urls[0], f"{urls[1]}/metrics", server, engines, loop, client, pool)
            started.append(running)
            ready.set()
            await asyncio.to_thread(over.wait)
            running.is_over = True
            for http in ports:
                await http.stop(0)
            await server.rooms.close()
            for each in engines:
                await each.stop()
            for listener in listeners:
                listener.close()
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(patience_s)
        yield started[0]
    finally:
        over.set()
        thread.join(PATIENCE_S)
