"""The client of an engine in a process of its own, which it replaces when it crashes or hangs."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from time import perf_counter

import msgspec
import zmq.asyncio

from engine.client.base import EngineClient
from engine.client.child import EngineChild
from engine.config import EngineConfig
from engine.frames import Command, Report, StepFrame
from engine.runtimes import choose_runtime
from engine.types import EngineInfo
from sluice.backoff import STABLE_S, RestartBudget
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

WATCH_S = 0.1
"""How often the engine's heartbeat is looked at."""
MIN_LOAD_TIMEOUT_S = 60.0
LOAD_TIMEOUT_FACTOR = 5.0
"""A new engine that takes so many times longer to load than the first did is not going to."""


class ProcessEngineClient(EngineClient):
    """The executor in a process of its own: `python -m module`, by default the one of the runtime that
    `engine.runtimes` chooses.

    An engine that crashes, or says nothing for `heartbeat_timeout_s`, is killed and replaced, and its requests go on in
    the next one. After several in a row that did nothing for anybody it is given up, and `failure` says why.
    """

    can_restart = True

    def __init__(self, config: EngineConfig, *, heartbeat_timeout_s: float = 10.0, module: str | None = None) -> None:
        super().__init__(config)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._module = module
        self._context = zmq.asyncio.Context()
        self._child = EngineChild(self._context)
        self._load_timeout_s: float | None = None
        self._ready_at = 0.0
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process; None before `start`."""
        return self._child.pid

    async def start(self) -> None:
        started = perf_counter()
        try:
            self._info = await self._child.load(await self._chosen_module(), self.config)
        except SluiceError:
            await self.stop()
            raise
        self._ready_at = self._last_report = perf_counter()
        self._load_timeout_s = max(MIN_LOAD_TIMEOUT_S, LOAD_TIMEOUT_FACTOR * (self._ready_at - started))
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self) -> None:
        self._die("the engine was stopped")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        await self._child.close()
        self._context.term()

    def kill(self) -> None:
        """End the engine's process now, for a gateway that is about to exit itself; `stop` is the way otherwise."""
        self._child.kill()

    def _send(self, command: Command) -> None:
        self._child.send(command)

    async def _chosen_module(self) -> str:
        """Chosen once. Raises SluiceError where no runtime can serve the model."""
        if self._module is None:
            choice = await asyncio.to_thread(choose_runtime, self.config)
            await asyncio.to_thread(choice.spec.check_process, self.config.engine_python)
            log.info("%s is served by %s: %s", self.config.model_path, choice.runtime.value, choice.reason)
            self._module = choice.spec.process
        return self._module

    # -- supervision

    async def _supervise(self) -> None:
        """Serve with one engine after the other, until one cannot be had any more."""
        budget = RestartBudget()
        try:
            while not budget.is_exhausted:
                reason = await self._serve()
                noticed = perf_counter()
                await self._bury(budget)
                log.error("%s; starting another, %d requests wait for it", reason, len(self._streams))
                await self._replace(reason, noticed, budget)
        except Exception as error:
            log.exception("supervising the engine failed")
            self._child.kill()
            self._die(f"supervising the engine failed: {error}")

    async def _serve(self) -> str:
        """Pass on what the engine says until it is lost; returns how."""
        reader = asyncio.create_task(self._read(), name="engine-reader")
        watcher = asyncio.create_task(self._until_silent(), name="engine-watcher")
        exited = self._child.exited
        try:
            await asyncio.wait((reader, watcher, exited), return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                reason = f"the engine process ended unexpectedly with code {exited.result()}"
            elif reader.done():
                reason = f"the engine cannot be understood: {reader.exception()}"
            else:
                reason = f"the engine has been silent for {self.heartbeat_age_s():.1f} s"
        finally:
            for task in (reader, watcher):
                task.cancel()
            await asyncio.wait((reader, watcher))
        return reason

    async def _read(self) -> None:
        while True:
            self._take((await self._child.receive(),))

    def _take(self, reports: Iterable[Report]) -> None:
        for report in reports:
            if isinstance(report, StepFrame):
                self._on_frame(report)

    async def _until_silent(self) -> None:
        """Returns when the engine has said nothing for too long."""
        while self.heartbeat_age_s() < self._heartbeat_timeout_s:
            before = perf_counter()
            await asyncio.sleep(WATCH_S)
            # Time in which this process did not run either, or did not come to listen, is no silence of the engine's.
            now = perf_counter()
            self._last_report = min(self._last_report + max(now - before - 2 * WATCH_S, 0.0), now)

    async def _bury(self, budget: RestartBudget) -> None:
        """End the lost engine, hear what it had to say, and judge."""
        self._begin_loss()
        self._child.kill()
        with suppress(msgspec.MsgspecError):  # perhaps it is for talking nonsense that it is lost
            self._take(await self._child.last_reports())
        has_worked = self.stats.generation_tokens_total > self._stats_before.generation_tokens_total
        is_stable = perf_counter() - self._ready_at >= STABLE_S
        has_culprit = self._lose()
        if has_worked or is_stable:
            budget.refill()
        else:
            budget.spend(has_culprit=has_culprit)

    async def _replace(self, reason: str, noticed: float, budget: RestartBudget) -> None:
        """Start another engine, or give up."""
        while not budget.is_exhausted:
            await asyncio.sleep(budget.delay_s())
            try:
                self._info = await self._load_another()
            except SluiceError as error:
                reason = f"it could not be started anew: {error.message}"
                log.error(reason)
                budget.spend()
                continue
            self._ready_at = perf_counter()
            self._regain(self._ready_at - noticed)
            log.warning("the engine is back after %.2f s", self.last_recovery_s)
            return
        log.critical("the engine is given up: %s", reason)
        self._die(f"the engine failed too often; the last time, {reason}")

    async def _load_another(self) -> EngineInfo:
        """A new engine. Raises SluiceError where it did not load."""
        await self._child.close()
        self._child = EngineChild(self._context)
        try:
            async with asyncio.timeout(self._load_timeout_s):
                return await self._child.load(await self._chosen_module(), self.config)
        except TimeoutError:
            message = f"it did not load within {self._load_timeout_s:g} s"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from None
