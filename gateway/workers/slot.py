"""The sockets of the shared port, and the worker processes that serve each of them, one after the other."""

import asyncio
import itertools
import logging
import pickle
import socket
import sys
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeVar

import msgspec
from starlette.types import ASGIApp

from sluice.backoff import STABLE_S, RestartBudget
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.tenancy.quotas.store import QuotaStore
from sluice.gateway.workers.counts import Family, WorkerCounts
from sluice.gateway.workers.models import Linked, Wanted
from sluice.gateway.workers.private import Peer
from sluice.gateway.workers.quotas import QuotaDesk
from sluice.pipelines.llm.model import LlmModel

log = logging.getLogger(__name__)

T = TypeVar("T")
_MODULE = "sluice.gateway.workers.worker"
_IDS = itertools.count(1)
_SYNC_S, _LINKING_S = 1.0, 0.05
"""How often a worker is asked what it serves: one that serves all that it should, and others."""
_START_S = 120.0
"""Longest time from a worker's start until it serves."""
_RETRY_S = 30.0
"""Seconds between tries to start a worker that has failed too often."""
HOST = "host"
"""Name of the host's socket in the folder of sockets."""


def socket_name(worker: int) -> str:
    """Return the name of a worker's socket in the folder of sockets."""
    return f"worker-{worker}"


class WorkerStart(NamedTuple):
    """The start message of a worker, on its standard input, which stays open as long as the host lives."""

    config: ServeConfig
    slot: int
    worker: int
    folder: Path
    log_socket: str


class WorkerProcess:
    """A worker from its start to its end. It is `start`ed once. Belongs to the event loop."""

    def __init__(self, folder: Path, counts: WorkerCounts, quotas: QuotaStore) -> None:
        """`folder` has the sockets, `counts` keeps what it counts, `quotas` what it holds."""
        self.id = next(_IDS)
        self.desk = QuotaDesk(quotas)
        self._folder = folder
        self._counts = counts
        self._peer = Peer(folder / socket_name(self.id))
        self._process: asyncio.subprocess.Process | None = None
        self._heard_at = monotonic()
        self._longest_silence_s = inf
        self._has_told_all = False
        self._wanted = Wanted()
        self._has_changed = asyncio.Event()
        self._has_answered = False
        self._has_agreed = asyncio.Event()
        self._has_agreed.set()  # one that starts serves nothing
        self._stays: dict[str, ExitStack] = {}
        """The models whose engine it may use, by id, each kept from closing."""
        self.is_linked = asyncio.Event()
        """Set while it is there and serves the models that it should."""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The process's exit code."""

    @property
    def _is_silent(self) -> bool:
        """Whether it has answered nothing for too long, though it is asked every second."""
        return self._has_answered and monotonic() - self._heard_at > self._longest_silence_s

    async def start(self, listener: socket.socket, config: ServeConfig, slot: int, log_socket: str) -> None:
        """Start the process, which accepts connections of `listener` as soon as it can. Raises OSError."""
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE, str(listener.fileno())),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # a terminal's signals are the host's
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(WorkerStart(config, slot, self.id, self._folder, log_socket)))
        self._heard_at, self._longest_silence_s = monotonic(), config.shutdown.heartbeat_timeout_s
        self._following = asyncio.create_task(self._follow(process), name=f"worker {self.id}")

    def serve(self, wanted: Wanted, models: dict[str, LlmModel]) -> None:
        """Have it serve what is wanted; `models` by id do not close as long as it uses them."""
        self._want(wanted)
        for id_, model in models.items():
            if id_ not in self._stays:
                self._stays[id_] = ExitStack()
                self._stays[id_].enter_context(model.guests)

    def drain(self, *, refuses: bool = False) -> None:
        """Let it end with its open requests."""
        self._want(msgspec.structs.replace(self._wanted, ends=True, refuses=refuses))

    def _want(self, wanted: Wanted) -> None:
        before = self._wanted
        if before.ends:
            wanted = msgspec.structs.replace(wanted, ends=True, refuses=wanted.refuses or before.refuses)
        if not wanted.ids <= before.ids:
            self.is_linked.clear()
        self._wanted = wanted
        if self._has_answered:
            self._has_agreed.clear()
        self._has_changed.set()

    async def wait_agreed(self) -> None:
        """Wait until it uses no other models than those that it is to serve, or has ended."""
        agreed = asyncio.create_task(self._has_agreed.wait())
        await asyncio.wait((agreed, self.ended), return_when=asyncio.FIRST_COMPLETED)
        agreed.cancel()

    async def ask(self, route: str, question: object, answer: type[T], timeout_s: float) -> T | None:
        """Return the answer of a private route; None where it does not come within `timeout_s`."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._peer.ask(route, question, answer)
        return None

    async def ask_counts(self, timeout_s: float) -> None:
        """Have it say now what it has counted. One that does not within `timeout_s` has said so before."""
        counts = await self.ask("counts", None, list[Family], timeout_s)
        if counts is not None:
            self._heard_at = monotonic()
            if not self._has_told_all:
                self._counts.keep(self.id, counts)

    def keep_last_counts(self, counts: list[Family]) -> None:
        """Keep what it has counted in all its life."""
        self._has_told_all = True
        self._counts.keep(self.id, counts)

    def kill(self) -> None:
        """End it now."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Ask it again and again until it ends."""
        syncing = asyncio.create_task(self._keep_synced(), name=f"worker {self.id} models")
        counting = asyncio.create_task(self._keep_counted(), name=f"worker {self.id} counts")
        code = await process.wait()
        for task in (syncing, counting):
            task.cancel()
        self._peer.close()
        (self._folder / socket_name(self.id)).unlink(missing_ok=True)
        self._counts.end(self.id)
        self.desk.close()
        for stay in self._stays.values():
            stay.close()
        self._stays.clear()
        self.ended.set_result(code)

    async def _keep_synced(self) -> None:
        while True:
            self._has_changed.clear()
            wanted = self._wanted
            try:
                self._take(await self._peer.ask("sync", wanted, Linked), wanted)
                pause_s = _SYNC_S if self.is_linked.is_set() else _LINKING_S
            except OSError:
                pause_s = _LINKING_S  # it starts or ends
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_changed.wait()

    async def _keep_counted(self) -> None:
        """Ask what it has counted, and end it where it says nothing, also when it ends with open requests."""
        while True:
            await asyncio.sleep(_SYNC_S)
            was_silent = self._is_silent  # only the second look counts: the host itself may not have run
            await self.ask_counts(_SYNC_S)
            if was_silent and self._is_silent:
                log.error("the process of an HTTP worker says nothing; it is ended")
                self.kill()
                return

    def _take(self, linked: Linked, wanted: Wanted) -> None:
        self._heard_at, self._has_answered = monotonic(), True
        if wanted is not self._wanted:
            return
        self._has_agreed.set()
        for id_ in self._stays.keys() - wanted.ids - {*linked.ids} - {*linked.coming}:
            self._stays.pop(id_).close()
        if wanted.ids <= {*linked.ids}:
            self.is_linked.set()


class WorkerMaker(NamedTuple):
    """What every new worker needs."""

    config: ServeConfig
    folder: Path
    log_socket: str
    counts: WorkerCounts
    quotas: QuotaStore

    def make(self) -> WorkerProcess:
        """Return a worker that has not started."""
        return WorkerProcess(self.folder, self.counts, self.quotas)


class Slot:
    """Keeps one socket served: by a worker, and by the host itself while there is none. Belongs to the event loop."""

    def __init__(self, number: int, listener: socket.socket, app: ASGIApp, maker: WorkerMaker) -> None:
        """`app` is the host's application."""
        self.number = number
        self.num_losses = 0
        self._listener = listener
        self._app = app
        self._maker = maker
        self._wanted = Wanted()
        self._models: dict[str, LlmModel] = {}
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
        self._serving_since = 0.0
        """When the current worker came to serve."""

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

    def serve(self, wanted: Wanted, models: dict[str, LlmModel]) -> None:
        """Have the workers serve what is wanted; `models` has the language models among it, by id."""
        self._wanted, self._models = wanted, models
        for each in self.workers():
            each.serve(wanted, models)

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
            await worker.start(self._listener, self._maker.config, self.number, self._maker.log_socket)
        except OSError as error:
            log.error("HTTP worker %d cannot be started: %s", self.number, error)
            return False
        self._workers.add(worker)
        worker.ended.add_done_callback(partial(self._note_end, worker))
        worker.serve(self._wanted, self._models)
        linked = asyncio.create_task(worker.is_linked.wait())
        try:
            await asyncio.wait((linked, worker.ended), timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            linked.cancel()
        if worker.ended.done() or not worker.is_linked.is_set():
            log.error("HTTP worker %d did not come to serve; the log has its own lines", self.number)
            worker.kill()
            return False
        earlier, self._current, self._serving_since = self._current, worker, monotonic()
        self._is_serving.set()
        self._end_stand_in()
        if earlier is not None:
            earlier.drain()
        return True

    async def _watch(self, worker: WorkerProcess) -> None:
        """Return when another worker is wanted: this one is lost, or to be replaced."""
        wanted = asyncio.create_task(self._is_wanted.wait())
        try:
            await asyncio.wait((worker.ended, wanted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            wanted.cancel()
        if worker.ended.done():
            await self._pause()

    async def _pause(self) -> None:
        """Wait before the next start."""
        await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        """Return how long to wait before the next start: longer the more have failed, and at most `_RETRY_S`."""
        return _RETRY_S if self._budget.is_exhausted else self._budget.delay_s()

    def _note_end(self, worker: WorkerProcess, ended: "asyncio.Future[int]") -> None:
        """Note that a worker is gone. The current one is lost, also while its successor starts."""
        self._workers.discard(worker)
        assert self._task is not None, "it has started the worker"
        if worker is self._current and not self._task.cancelling():
            self._lose(ended.result())

    def _lose(self, code: int) -> None:
        log.error("HTTP worker %d ended with code %d; another one starts", self.number, code)
        self.num_losses += 1
        self._current = None
        self._is_serving.clear()
        self._begin_stand_in()
        if monotonic() - self._serving_since >= STABLE_S:
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
