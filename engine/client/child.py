"""One engine process, from its start to its end, and the socket to it."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.frames import Command, LoadFailed, Ready, Report, Shutdown, StepFrame
from engine.process.process_group import kill_session
from engine.runtimes import RUNTIMES
from engine.types import EngineInfo
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

EXIT_WAIT_S = 5.0
LAST_WORDS_S = 1.0
"""How long a message of a process that has ended may take to be read."""
DRAIN_MS = 20
"""How long the socket of a process that has ended must be silent until all it said is read."""


class EngineChild:
    """Speaks ZeroMQ over a socket file that only this user can reach. Made once, `load`ed once, `close`d once."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self.folder = Path(tempfile.mkdtemp(prefix="sluice-"))
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Future[int] | None = None
        self._is_loaded = False
        self._is_gone = False
        """Whether the process has ended and what it started was killed: its id may be another's from then on."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exited(self) -> "asyncio.Future[int]":
        """The process' exit code, when it has ended; negative for the signal that ended it."""
        assert self._exit is not None
        return self._exit

    async def load(self, module: str, config: EngineConfig) -> EngineInfo:
        """Start `python -m module` and wait until its model is loaded. Raises SluiceError where it cannot.

        It has a session of its own, so that what it starts (a launcher's ranks, a library's workers) ends with it.
        """
        endpoint = f"ipc://{self.folder / 'engine'}"
        level = logging.getLevelName(logging.root.level)
        config_file = self.folder / "config"
        config_file.write_bytes(msgspec.json.encode(config))  # the folder is this user's alone
        arguments = (endpoint, str(os.getpid()), level, str(config_file))
        command = (*config.launcher, _python(module, config), "-m", module, *arguments)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            message = f"the engine process cannot be started by {command[0]}: {error.strerror}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
        self._exit = asyncio.ensure_future(self._process.wait())
        self._socket.connect(endpoint)
        await self._socket.send(b"")
        match await self._first_report():
            case Ready(info):
                self._is_loaded = True
                return info
            case LoadFailed(code, message):
                raise SluiceError(code, message)
            case StepFrame():
                raise AssertionError("a step before the engine was ready")

    async def _first_report(self) -> Report:
        report = asyncio.ensure_future(self.receive())
        try:
            await asyncio.wait((self.exited, report), return_when=asyncio.FIRST_COMPLETED)
            if not report.done():  # its last words may still be on their way
                await asyncio.wait((report,), timeout=LAST_WORDS_S)
            if not report.done():
                code = self.exited.result()
                raise SluiceError(
                    ErrorCode.UNAVAILABLE,
                    f"the engine process ended with code {code} while loading; its own lines in the log say more",
                )
            return report.result()
        finally:
            report.cancel()

    async def receive(self) -> Report:
        report: Report = self._decoder.decode(await self._socket.recv())
        return report

    def send(self, command: Command) -> None:
        # Without a bound (high-water mark 0) a send never waits, so its future is done at once.
        self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)

    def kill(self) -> None:
        """End the process and all of its session now; `close` is still to be called, unless this process is about to
        end itself."""
        if self._process is not None and not self._is_gone:
            self._is_gone = self._process.returncode is not None
            kill_session(self._process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def last_reports(self) -> list[Report]:
        """What a killed process had sent and nobody has read."""
        await self._wait_exit()
        reports = []
        while await self._socket.poll(DRAIN_MS):
            reports.append(await self.receive())
        return reports

    async def close(self) -> None:
        """End the process, gently where it can hear, and give everything back. Idempotent."""
        if self._process is not None and not self.exited.done():
            if self._is_loaded:
                self.send(Shutdown())
            else:  # it reads no commands yet
                self.kill()
            await self._wait_exit()
        self.kill()
        self._socket.close()

    async def _wait_exit(self) -> None:
        """Wait for the end, and enforce it where it does not come. Then what is left of its session ends too."""
        await asyncio.wait((self.exited,), timeout=EXIT_WAIT_S)
        if not self.exited.done():
            log.warning("the engine did not end within %g s; killing it", EXIT_WAIT_S)
            self.kill()
            # Even a kill waits for a process that the kernel holds; it is not waited for without end.
            await asyncio.wait((self.exited,), timeout=EXIT_WAIT_S)
        self.kill()


def _python(module: str, config: EngineConfig) -> str:
    """Return the Python that runs `module`, the process of a runtime."""
    return next((spec.python(config) for spec in RUNTIMES.values() if spec.process == module), sys.executable)
