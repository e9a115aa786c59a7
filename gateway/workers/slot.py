"""One socket of the shared port, and the workers that serve it, one after the other."""

import asyncio
import logging
import socket
from math import inf
from time import monotonic
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp

from sluice.backoff import STABLE_S, RestartBudget
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.tenancy.quotas.store import QuotaStore
from sluice.gateway.workers.counts import WorkerCounts
from sluice.gateway.workers.messages import Welcome
from sluice.gateway.workers.process import WorkerProcess
from sluice.gateway.workers.quotas import QuotaDesk
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.sharing import SharedModel

log = logging.getLogger(__name__)

_START_S = 120.0
"""Longest time from a worker's start until it serves."""
_RETRY_S = 30.0
"""Seconds between tries to start a worker that has failed too often."""
_WATCH_S = 1.0


class WorkerMaker(NamedTuple):
    """What every new worker needs."""

    welcome: Welcome
    counts: WorkerCounts
    quotas: QuotaStore
    heartbeat_timeout_s: float

    def make(self) -> WorkerProcess:
        """Return a worker that has not started."""
        return WorkerProcess(self.counts, QuotaDesk(self.quotas))


class Slot:
    """Keeps one socket served: by a worker, and by the host itself while there is none. Belongs to the event loop."""

    def __init__(self, number: int, listener: socket.socket, app: ASGIApp, maker: WorkerMaker) -> None:
        """`app` is the host's application."""
        self.number = number
        self.num_losses = 0
        self._listener = listener
        self._app = app
        self._maker = maker
        self._models: dict[str, tuple[SharedModel, LlmModel]] = {}
        self._current: WorkerProcess | None = None
        self._workers: set[WorkerProcess] = set()
        """All that live: the current one, one that starts, and those that end."""
        self._stand_in: HttpServer | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._is_serving = asyncio.Event()
        self._replacing: asyncio.Future[bool] | None = None
        self._is_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._budget = RestartBudget()

    @property
    def is_serving(self) -> bool:
        """Whether a worker serves."""
        return self._is_serving.is_set()

    def workers(self) -> list[WorkerProcess]:
        """Return the workers that live."""
        return [each for each in self._workers if not each.ended.done()]

    def start(self) -> None:
        """Serve from now on."""
        self._begin_stand_in()
        self._task = asyncio.create_task(self._keep(), name=f"http-worker-{self.number}")

    def serve(self, models: dict[str, tuple[SharedModel, LlmModel]]) -> None:
        """Have the workers serve these models."""
        self._models = models
        for each in self.workers():
            each.serve(models)

    async def wait_serving(self) -> None:
        """Wait until a worker serves with all models."""
        while self._current is None or not self._current.is_linked.is_set():
            await self._is_serving.wait()
            if self._current is not None:
                await self._current.is_linked.wait()

    async def replace(self) -> bool:
        """Replace the worker by another. Returns whether that serves; the old one goes on otherwise."""
        self._replacing = asyncio.get_running_loop().create_future()
        self._is_wanted.set()
        return await self._replacing

    # --- workers ---

    async def _keep(self) -> None:
        """Keep a worker there until cancelled."""
        while True:
            has_started = await self._fill()
            if self._replacing is not None and not self._replacing.done():
                self._replacing.set_result(has_started)
            self._is_wanted.clear()
            if self._current is None:
                self._budget.spend()
                await self._pause()
                continue
            await self._watch(self._current)

    async def _fill(self) -> bool:
        """Start a worker and give it the socket. Returns whether it serves."""
        worker = self._maker.make()
        try:
            await worker.start(self._listener, msgspec.structs.replace(self._maker.welcome, number=self.number))
        except OSError as error:
            log.error("HTTP worker %d cannot be started: %s", self.number, error)
            return False
        self._workers.add(worker)
        worker.ended.add_done_callback(lambda _: self._workers.discard(worker))
        worker.serve(self._models)
        linked = asyncio.create_task(worker.is_linked.wait())
        try:
            await asyncio.wait((linked, worker.ended), timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            linked.cancel()
        if worker.ended.done() or not worker.is_linked.is_set():
            log.error("HTTP worker %d did not come to serve; the log has its own lines", self.number)
            worker.kill()
            return False
        earlier, self._current = self._current, worker
        self._is_serving.set()
        self._end_stand_in()
        if earlier is not None:
            earlier.drain()
        return True

    async def _watch(self, worker: WorkerProcess) -> None:
        """Return when another worker is wanted: this one is lost, or to be replaced."""
        started = monotonic()
        wanted = asyncio.create_task(self._is_wanted.wait())
        try:
            while not worker.ended.done() and not wanted.done():
                await asyncio.wait((worker.ended, wanted), timeout=_WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                if worker.silence_s > self._maker.heartbeat_timeout_s:
                    await asyncio.sleep(_WATCH_S)  # the host itself may not have run, and reads first
                    if worker.silence_s > self._maker.heartbeat_timeout_s:
                        log.error("HTTP worker %d says nothing; it is ended", self.number)
                        worker.kill()
                        await worker.ended
        finally:
            wanted.cancel()
        if worker.ended.done():
            self._lose(worker, is_stable=monotonic() - started >= STABLE_S)
            await self._pause()

    async def _pause(self) -> None:
        """Wait before the next start."""
        await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        """Return how long to wait before the next start: longer the more have failed, and at most `_RETRY_S`."""
        return _RETRY_S if self._budget.is_exhausted else self._budget.delay_s()

    def _lose(self, worker: WorkerProcess, *, is_stable: bool) -> None:
        log.error("HTTP worker %d ended with code %d; another one starts", self.number, worker.ended.result())
        self.num_losses += 1
        self._current = None
        self._is_serving.clear()
        self._begin_stand_in()
        if is_stable:
            self._budget.refill()
        else:
            self._budget.spend()

    # --- the host in a worker's place ---

    def _begin_stand_in(self) -> None:
        if self._stand_in is None:
            self._stand_in = HttpServer(self._app, self._listener.dup())
            self._stand_in.start()

    def _end_stand_in(self) -> None:
        if self._stand_in is not None:
            ending = asyncio.create_task(_end(self._stand_in))
            self._stand_in = None
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    # --- shutdown ---

    def begin_stop(self) -> None:
        """Take no more connections, and end with those that are open."""
        if self._task is not None and not self._task.cancelled():
            self._task.cancel()
        if self._replacing is not None and not self._replacing.done():
            self._replacing.set_result(False)
        if self._stand_in is not None:
            self._stand_in.begin_stop()
        for each in self.workers():
            each.drain(refuses=True)

    async def stop(self, timeout_s: float) -> None:
        """Give the workers `timeout_s` to end, then end them."""
        if self._stand_in is not None:
            await self._stand_in.stop(timeout_s)
        for ending in list(self._endings):
            ending.cancel()
        ends = [each.ended for each in self.workers()]
        if ends:
            await asyncio.wait(ends, timeout=timeout_s)
        for each in self.workers():
            each.kill()
            await each.ended


async def _end(server: HttpServer) -> None:
    """End a server with its open requests, however long they take."""
    try:
        await server.drain(inf)
    finally:
        await server.stop(0)
