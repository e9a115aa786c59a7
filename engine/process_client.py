"""The client of an engine in a process of its own."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import msgspec
import zmq
import zmq.asyncio

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.frames import Command, LoadFailed, Ready, Report, Shutdown, StepFrame

log = logging.getLogger(__name__)

EXIT_WAIT_S = 5.0
LAST_WORDS_S = 1.0
"""How long a message of a process that has ended may take to be read."""


class ProcessEngineClient(EngineClient):
    """The executor in a process of its own, over ZeroMQ on a socket file that only this user can reach."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        endpoint = f"ipc://{self._folder / 'engine'}"
        level = logging.getLevelName(logging.root.level)
        arguments = (endpoint, str(os.getpid()), level, msgspec.json.encode(self.config).decode())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine.process", *arguments, stdin=asyncio.subprocess.DEVNULL
        )
        self._socket.connect(endpoint)
        await self._socket.send(b"")
        exited = asyncio.ensure_future(self._process.wait())
        report = asyncio.ensure_future(self._receive())
        await asyncio.wait((exited, report), return_when=asyncio.FIRST_COMPLETED)
        if exited.done():  # its last words may still be on their way
            await asyncio.wait((report,), timeout=LAST_WORDS_S)
        if not report.done():
            report.cancel()
            await self.stop()
            raise SluiceError(
                ErrorCode.UNAVAILABLE, f"the engine process ended with code {exited.result()} while loading"
            )
        await self._take_first(report.result())
        self._reader = asyncio.create_task(self._read(), name="engine-reader")
        self._watcher = asyncio.create_task(self._watch(exited), name="engine-watcher")

    async def _take_first(self, report: Report) -> None:
        match report:
            case Ready():
                self._info = report.info
                self._last_report = perf_counter()
            case LoadFailed():
                await self.stop()
                raise SluiceError(report.code, report.message)
            case StepFrame():
                raise AssertionError("a step before the engine was ready")

    async def _receive(self) -> Report:
        report: Report = self._decoder.decode(await self._socket.recv())
        return report

    async def _read(self) -> None:
        try:
            while True:
                report = await self._receive()
                if isinstance(report, StepFrame):
                    self._on_frame(report)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("reading from the engine failed")
            self._die(f"the engine cannot be understood: {error}")

    async def _watch(self, exited: "asyncio.Future[int]") -> None:
        code = await exited
        if not self._is_stopping:
            log.critical("the engine process ended unexpectedly with code %d", code)
            self._die(f"the engine process ended unexpectedly with code {code}")

    def _send(self, command: Command) -> None:
        # Without a bound (high-water mark 0) a send never waits, so its future is done at once.
        self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def stop(self) -> None:
        self._is_stopping = True
        if self.failure is None and self._reader is not None:
            self._send(Shutdown())
        self._die("the engine was stopped")
        await self._end_process()
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._reader, self._watcher)), return_exceptions=True)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the engine's process now, for a gateway that is about to exit itself; `stop` is the way otherwise."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._reader is None:  # still loading: it reads no commands yet
            process.kill()
        try:
            await asyncio.wait_for(process.wait(), EXIT_WAIT_S)
        except TimeoutError:
            log.warning("the engine did not end within %g s; killing it", EXIT_WAIT_S)
            process.kill()
            await process.wait()
