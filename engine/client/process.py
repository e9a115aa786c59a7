"""The client of an engine in a process of its own, which it replaces if it crashes or hangs."""

import asyncio
import contextvars
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec
import zmq

from sluice.backoff import STABLE_S, RestartBudget
from sluice.engine.client.link import EngineLink, LinkedEngineClient
from sluice.engine.client.supervision import Clock
from sluice.engine.config import EngineConfig
from sluice.engine.frames import (
    Attach,
    Command,
    Drain,
    EngineView,
    LoadFailed,
    PrefixChanges,
    ProbeTurn,
    Ready,
    Report,
    Shutdown,
    StepFrame,
)
from sluice.engine.process.process_group import kill_session
from sluice.engine.runtimes import RUNTIMES, choose_runtime
from sluice.engine.types import BlockSource, EngineInfo
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import ProcessLog
from sluice.run_folder import make_socket_folder

log = logging.getLogger(__name__)

MIN_LOAD_TIMEOUT_S = 60.0
LOAD_TIMEOUT_FACTOR = 5.0
"""A new engine may take this many times as long to load as the first one did."""
EXIT_WAIT_S = 5.0
LAST_REPORT_S = 1.0
"""How long a message of a process that has ended may take to arrive."""


class ProcessEngineClient(LinkedEngineClient):
    """The client of an executor in a process of its own.

    The process is `python -m module`, by default the module of the runtime that `sluice.engine.runtimes` chooses.

    An engine that crashes, or sends nothing for `heartbeat_timeout_s`, is killed and replaced, and its requests
    continue in the next one. It is given up after several in a row that served no request; `failure` then has the
    reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        heartbeat_timeout_s: float = 10.0,
        module: str | None = None,
        shared_socket: Path | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        """With `shared_socket` that path always leads to the socket of the engine that serves now, so that clients in
        other processes can attach to it."""
        super().__init__(config, heartbeat_timeout_s, clock)
        self._module = module
        self.shared_socket = shared_socket
        self.endpoints: tuple[str, ...] = ()
        """Where the engine takes clients over TCP, with their real ports."""
        self._is_draining = False
        self._context = zmq.Context()
        self._engine = self._make_process()
        self._load_timeout_s: float | None = None
        self._ready_at = 0.0
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None before `start`."""
        return self._engine.pid

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self.pid is None else (self.pid,)

    async def start(self) -> None:
        started = self._clock()
        try:
            ready = await self._engine.load(await self._choose_module(), self.config)
            self._info, self.endpoints = ready.info, ready.endpoints
            self._share_socket()
        except SluiceError:
            await self.stop()
            raise
        if self.config.listening is not None:  # engines to come have the same ports
            listening = msgspec.structs.replace(self.config.listening, endpoints=[*self.endpoints])
            self.config = msgspec.structs.replace(self.config, listening=listening)
        if self.on_prefixes is not None:
            self._ask_prefixes()
        self._ready_at = self._last_report = self._clock()
        self._load_timeout_s = max(MIN_LOAD_TIMEOUT_S, LOAD_TIMEOUT_FACTOR * (self._ready_at - started))
        # What it logs is not about the request that has loaded the model, whose id is in this context.
        self._supervisor = asyncio.create_task(
            self._supervise(), name="engine-supervisor", context=contextvars.Context()
        )

    async def stop(self) -> None:
        self._die("the engine was stopped")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        await self._engine.close()
        self._context.term()

    @property
    def block_source(self) -> BlockSource | None:
        return BlockSource(f"ipc://{self._engine.socket_file}") if self.is_serving else None

    def drain(self) -> None:
        """Let the engine, and those that replace it, take no new requests. Those that it has go on."""
        self._is_draining = True
        if not self.is_restarting and self.failure is None:
            self._send(Drain())

    def _restore_engine(self) -> None:
        super()._restore_engine()
        if self.on_prefixes is not None:
            self._ask_prefixes()
        if self._is_draining:
            self._send(Drain())

    def kill(self) -> None:
        self._engine.kill()

    def _send(self, command: Command | Attach) -> None:
        self._engine.link.send(command)

    _send_attach = _send

    async def _receive(self) -> Report:
        return await self._engine.link.receive()

    def _die(self, reason: str) -> None:
        super()._die(reason)
        if self.shared_socket is not None:  # nobody waits there for another engine
            self.shared_socket.unlink(missing_ok=True)

    def _share_socket(self) -> None:
        """Let the shared path lead to the engine that serves from now on."""
        if self.shared_socket is not None:
            fresh = self.shared_socket.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(self._engine.socket_file)
            fresh.replace(self.shared_socket)

    def _make_process(self) -> "EngineProcess":
        """Return the process of the next engine, which is not started yet."""
        return EngineProcess(self._context)

    async def _choose_module(self) -> str:
        """Choose the engine's module, once. Raises SluiceError if no runtime can serve the model."""
        if self._module is None:
            choice = await asyncio.to_thread(choose_runtime, self.config)
            await asyncio.to_thread(choice.spec.check_process, self.config.engine_python)
            log.info("%s is served by %s: %s", self.config.model_path, choice.runtime.value, choice.reason)
            self._module = choice.spec.process
        return self._module

    # -- supervision

    async def _supervise(self) -> None:
        """Serve with one engine after the other, until the restart budget is exhausted."""
        budget = RestartBudget()
        try:
            while not budget.is_exhausted:
                reason = await self._serve()
                detected = self._clock()
                await self._end_lost_engine(budget)
                log.error("%s; starting another, %d requests wait for it", reason, len(self._streams))
                await self._replace_engine(reason, detected, budget)
        except Exception as error:
            log.exception("supervising the engine failed")
            self._engine.kill()
            self._die(f"supervising the engine failed: {error}")

    async def _serve(self) -> str:
        """Process the engine's reports until it is lost. Returns how it was lost."""
        reader = asyncio.create_task(self._read(), name="engine-reader")
        watcher = asyncio.create_task(self._until_silent(), name="engine-watcher")
        exited = self._engine.exited
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

    async def _end_lost_engine(self, budget: RestartBudget) -> None:
        """End the lost engine, read its last reports, queue its streams again, and charge the restart budget."""
        self._begin_recovery()
        self._engine.kill()
        self._process_reports(await self._engine.read_remaining())
        has_worked = self.stats.generation_tokens_total > self._stats_before.generation_tokens_total
        is_stable = self._clock() - self._ready_at >= STABLE_S
        has_culprit = self._requeue_streams()
        if has_worked or is_stable:
            budget.refill()
        else:
            budget.spend(has_culprit=has_culprit)

    async def _replace_engine(self, reason: str, detected: float, budget: RestartBudget) -> None:
        """Start another engine, or give up."""
        if self.keeper is not None:
            await self.keeper.until_resumed(self.replica)
        while not budget.is_exhausted:
            await asyncio.sleep(budget.delay_s())
            try:
                self._info = await self._load_another()
                self._share_socket()
            except SluiceError as error:
                reason = f"it could not be started anew: {error.message}"
                log.error(reason)
                budget.spend()
                continue
            self._ready_at = self._clock()
            self._end_recovery(self._ready_at - detected)
            log.warning("the engine is back after %.2f s", self.recoveries.last_s)
            return
        log.critical("the engine is given up: %s", reason)
        self._die(f"the engine failed too often; the last time, {reason}")

    async def _load_another(self) -> EngineInfo:
        """Load a new engine. Raises SluiceError if it does not load."""
        await self._engine.close()
        self._engine = self._make_process()
        try:
            async with asyncio.timeout(self._load_timeout_s):
                return (await self._engine.load(await self._choose_module(), self._lora.config_now(self.config))).info
        except TimeoutError:
            message = f"it did not load within {self._load_timeout_s:g} s"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from None


class EngineProcess:
    """One engine process from its start to its end, and the socket to it, a file that only this user can access. It is
    `load`ed once and `close`d once."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.folder = make_socket_folder("engine")
        self.socket_file = self.folder / "engine"
        self.link = EngineLink(context)
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Future[int] | None = None
        self._is_loaded = False
        self._is_reaped = False
        """Whether the process has ended and its session was killed. Its id may be another process's from then on."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exited(self) -> "asyncio.Future[int]":
        """The process's exit code once it has ended; negative for the signal that ended it."""
        assert self._exit is not None
        return self._exit

    async def load(self, module: str, config: EngineConfig) -> Ready:
        """Start `python -m module` and wait until its model is loaded. Raises SluiceError if that fails. Its session is
        its own, so that processes it starts (a launcher's ranks, a library's workers) end with it."""
        endpoint = f"ipc://{self.socket_file}"
        config_file = self.folder / "config"
        config_file.write_bytes(msgspec.json.encode(config))  # only this user can access the folder
        arguments = (endpoint, str(os.getpid()), ProcessLog.as_here().to_argument(), str(config_file))
        command = (*config.launcher, _python(module, config), "-m", module, *arguments)
        self._exit = await self._start(command)
        self.link.open(endpoint)
        self.link.greet()
        match await self._first_report():
            case Ready() as ready:
                self._is_loaded = True
                return ready
            case LoadFailed(code, message):
                raise SluiceError(code, message)
            case StepFrame() | ProbeTurn() | PrefixChanges() | EngineView():
                raise AssertionError("a step before the engine was ready")

    async def _start(self, command: Sequence[str]) -> "asyncio.Future[int]":
        """Start the process. Returns its exit code to come. Raises UNAVAILABLE where it cannot be started."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            message = f"the engine process cannot be started by {command[0]}: {error.strerror}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
        return asyncio.ensure_future(self._process.wait())

    async def _first_report(self) -> Report:
        report = asyncio.ensure_future(self.link.receive())
        try:
            await asyncio.wait((self.exited, report), return_when=asyncio.FIRST_COMPLETED)
            if not report.done():  # its last message may still be on the way
                await asyncio.wait((report,), timeout=LAST_REPORT_S)
            if not report.done():
                code = self.exited.result()
                raise SluiceError(
                    ErrorCode.UNAVAILABLE,
                    f"the engine process ended with code {code} while loading; its own lines in the log say more",
                )
            return report.result()
        finally:
            report.cancel()

    def kill(self) -> None:
        """End the process and all of its session now. `close` must follow, unless this process is about to exit."""
        if self._process is not None and not self._is_reaped:
            self._is_reaped = self._process.returncode is not None
            kill_session(self._process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def read_remaining(self) -> list[Report]:
        """Wait for the end of a killed process, and return the reports that are still unread."""
        await self._wait_exit()
        return await self.link.read_remaining()

    async def close(self) -> None:
        """End the process, by a command if it can receive one, and free all resources. Idempotent."""
        if self._exit is not None and not self.exited.done():
            if self._is_loaded:
                self.link.send(Shutdown())
            else:  # it does not read commands yet
                self.kill()
            await self._wait_exit()
        self.kill()
        self.link.close()

    async def _wait_exit(self) -> None:
        """Wait for the process to end, and kill it after a while. Then kill the rest of its session."""
        await asyncio.wait((self.exited,), timeout=EXIT_WAIT_S)
        if not self.exited.done():
            log.warning("the engine did not end within %g s; killing it", EXIT_WAIT_S)
            self.kill()
            # A process that the kernel holds outlives even a kill, so this wait is bounded too.
            await asyncio.wait((self.exited,), timeout=EXIT_WAIT_S)
        self.kill()


def _python(module: str, config: EngineConfig) -> str:
    """Return the Python that runs `module`, the process of a runtime."""
    return next((spec.python(config) for spec in RUNTIMES.values() if spec.process == module), sys.executable)
