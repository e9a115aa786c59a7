"""The client of an engine that another process has started, and replaces where it is lost."""

import asyncio
import contextvars
import logging
import os
from pathlib import Path
from time import perf_counter

import zmq

from sluice.engine.client.link import EngineLink, LinkedEngineClient
from sluice.engine.client.supervision import Clock
from sluice.engine.config import EngineConfig
from sluice.engine.frames import (
    Attach,
    Command,
    EngineView,
    LoadFailed,
    PrefixChanges,
    ProbeTurn,
    Ready,
    Report,
    StepFrame,
)
from sluice.engine.process.curve import ClientCurve
from sluice.engine.statistics import NO_STATS
from sluice.engine.types import BlockSource, EngineInfo
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

ALIVE_S = 1.0
"""How often the engine hears that this client lives."""
_LOOK_S = 0.5
"""How often a client without an engine looks whether there will be another."""
_BACKOFF_S = (0.1, 2.0)
"""Seconds between two tries to connect over TCP, from the first pause to the longest."""


class AttachedEngineClient(LinkedEngineClient):
    """A client beside the launcher of an engine, at the socket that it shares (`ProcessEngineClient`) or over TCP.

    Where the engine is lost, or takes this client for dead, requests wait and continue in the one that is found at the
    socket next. They end in an error where the launcher takes the socket away: it has stopped the engine, or given it
    up; over TCP, where no engine was found for `give_up_after_s`. They are cancelled in the engine some seconds after
    this process has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        place: Path | str,
        *,
        curve: ClientCurve | None = None,
        heartbeat_timeout_s: float = 10.0,
        give_up_after_s: float | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        """`place` is the path of the launcher's shared socket, or an endpoint `tcp://HOST:PORT` with the keys `curve`.
        Without `give_up_after_s` the client waits for an engine over TCP as long as it takes."""
        super().__init__(config, heartbeat_timeout_s, clock)
        self._socket = place if isinstance(place, Path) else None
        self.endpoint = f"ipc://{place}" if isinstance(place, Path) else place
        self._curve = curve
        self._give_up_after_s = give_up_after_s
        self.problem: str | None = None
        """Why the engine cannot be reached at the moment, where that is known."""
        self._context = zmq.Context()
        self._link: EngineLink | None = None
        self._engine_id = 0
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Attach to the engine, and wait for it where it is not there yet."""
        self._info = await self._attach()
        self._last_report = self._clock()
        # What it logs is not about the request that has attached it, whose id is in this context.
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-link", context=contextvars.Context())

    async def stop(self) -> None:
        """Leave the engine, which goes on. Open streams end in an error, and are cancelled there."""
        for stream in list(self._streams.values()):
            stream.cancel()
            stream.fail(SluiceError(ErrorCode.UNAVAILABLE, "this client has left the engine"))
        self._die("this client has left the engine")
        try:
            if self._supervisor is not None:
                self._supervisor.cancel()
                await asyncio.wait((self._supervisor,))
        finally:  # also where this itself is cancelled
            if self._link is not None:
                self._link.close(linger_s=ALIVE_S)
            self._context.term()

    @property
    def block_source(self) -> BlockSource | None:
        key = "" if self._curve is None else self._curve.server.decode()
        return BlockSource(self.endpoint, server_key=key) if self.is_serving else None

    def _send(self, command: Command | Attach) -> None:
        assert self._link is not None
        self._link.send(command)

    _send_attach = _send

    async def _receive(self) -> Report:
        assert self._link is not None
        return await self._link.receive()

    async def _attach(self) -> EngineInfo:
        """Return the facts about the engine at the socket, once there is one. Raises the error with which it failed to
        load, UNAVAILABLE where there will be none any more."""
        began, (pause_s, max_pause_s) = self._clock(), _BACKOFF_S
        while True:
            link = self._link = EngineLink(self._context)
            lost = link.disconnection()
            link.open(self.endpoint, self._curve)
            link.send(self._attachment())
            greeting = asyncio.ensure_future(_greeting(link))
            try:
                while not lost.done():
                    await asyncio.wait((greeting, lost), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    if greeting.done():
                        ready = greeting.result()
                        self._engine_id = ready.engine_id
                        self.problem = None
                        return ready.info
                    self._check_socket(began)
            except SluiceError as error:
                if self._socket is not None or not greeting.done():
                    raise
                self._note_problem(error.message)  # its launcher, elsewhere, tries again
            finally:
                greeting.cancel()
            link.close()  # that engine has ended before it answered
            if self._socket is None:
                self._note_problem(link.refusal or "its connection ended")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, max_pause_s)

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("the engine at %s cannot be used yet: %s", self.endpoint, problem)

    def _check_socket(self, began: float) -> None:
        """Raise UNAVAILABLE where the launcher has taken the socket away (before the first engine it may be to come),
        or the engine over TCP was looked for since `began`, which is too long."""
        if self._socket is not None and self._info is not None and not os.path.lexists(self._socket):
            raise SluiceError(ErrorCode.UNAVAILABLE, "the engine was stopped")
        limit_s = self._give_up_after_s
        if self._socket is None and limit_s is not None and self._clock() - began >= limit_s:
            reason = f": {self.problem}" if self.problem else ""
            message = f"no engine could be reached at {self.endpoint} for {limit_s:g} s{reason}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message)

    async def _supervise(self) -> None:
        """Serve with the engine that is at the socket, one after the other."""
        try:
            while True:
                reason = await self._serve()
                detected = self._clock()
                self._begin_recovery()
                assert self._link is not None
                self._process_reports(await self._link.read_remaining())
                self._link.close()
                if self.keeper is not None:  # other engines may go on at once, whatever became of this one
                    self._requeue_streams()
                log.error("%s; %d requests wait", reason, len(self._streams))
                lost_id, adapters = self._engine_id, self.info.adapters
                self._info = await self._attach()
                if self._engine_id == lost_id:
                    self._queue.requeue_unharmed()
                    self._stats_before = NO_STATS
                else:
                    self._requeue_streams()
                self._lora.missing = {*adapters} - {*self._info.adapters}
                self._end_recovery(self._clock() - detected)
                log.warning("attached to the engine again after %.2f s", self.recoveries.last_s)
        except SluiceError as error:
            self._die(error.message)
        except Exception as error:
            log.exception("the engine cannot be followed")
            self._die(f"the engine cannot be followed: {error}")

    def _restore_engine(self) -> None:
        """Leave it to the launcher. Requests of adapters that it is still to load wait here."""
        self._info = self._lora.with_missing(self.info)

    async def _serve(self) -> str:
        """Process the engine's reports until it is lost. Returns how it was lost."""
        assert self._link is not None
        lost = self._link.disconnection()
        reader = asyncio.create_task(self._read(), name="engine-reader")
        watcher = asyncio.create_task(self._until_silent(), name="engine-watcher")
        speaker = asyncio.create_task(self._say_alive(), name="engine-speaker")
        tasks = (reader, watcher, speaker)
        try:
            await asyncio.wait((*tasks, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return "the engine is gone"
            if reader.done():
                return f"the link to the engine failed: {reader.exception()}"
            return f"the engine has been silent for {self.heartbeat_age_s():.1f} s"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._send_attach(self._attachment())


async def _greeting(link: EngineLink) -> Ready:
    """Return the answer to `Attach`. Raises the error with which the engine failed to load."""
    while True:
        match await link.receive():
            case Ready() as ready:
                return ready
            case LoadFailed(code, message):
                raise SluiceError(code, message)
            case StepFrame() | ProbeTurn() | PrefixChanges() | EngineView():
                continue
