"""The async side of the engine: what the gateway holds.

Two clients, one behaviour: `ProcessEngineClient` runs the executor in a process of its own,
`InProcessEngineClient` on a thread of this one. This module is where asyncio and the engine meet.
"""

import asyncio
import itertools
import logging
import os
import queue
import secrets
import shutil
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.executor import InflightExecutor
from engine.frames import Cancel, Command, LoadFailed, Ready, Report, Shutdown, StepFrame, Submit
from engine.runners.base import Runner
from engine.runners.loader import load_runner
from engine.stream import GenerationStream
from engine.types import EngineInfo, EngineStats, GenerateRequest
from engine.validation import check_request

log = logging.getLogger(__name__)

EXIT_WAIT_S = 5.0
_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)


class EngineClient(ABC):
    """Submits requests and hands each stream its events. All methods run on one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = _NO_STATS
        self.failure: str | None = None
        """Why the engine is dead; None while it is not."""
        self._info: EngineInfo | None = None
        self._streams: dict[int, GenerationStream] = {}
        # The first number is random, so that several clients of one engine do not meet.
        self._stream_ids = itertools.count(secrets.randbits(62))
        self._last_report = perf_counter()

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises UNAVAILABLE before `start` returned."""
        if self._info is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the engine is still loading")
        return self._info

    @abstractmethod
    async def start(self) -> None:
        """Load the model; returns when the engine can be asked. Raises SluiceError where it cannot."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; streams under way end in an error. Idempotent."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue `request`. Raises INVALID for what can never be served, UNAVAILABLE without an engine.

        A full queue is told by the stream: its first event raises OVERLOADED.
        """
        if self.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure)
        check_request(request, self.info)
        stream = GenerationStream(next(self._stream_ids), self._cancel)
        self._streams[stream.stream_id] = stream
        self._send(Submit(stream.stream_id, request))
        return stream

    def abort_all(self, error: SluiceError) -> None:
        """End every open stream with `error` and free what it holds in the engine."""
        for stream in list(self._streams.values()):
            stream.cancel()
            stream.fail(error)

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last said anything. It speaks at every step, and when idle twice a second."""
        return perf_counter() - self._last_report

    def _cancel(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None and self.failure is None:
            self._send(Cancel(stream_id))

    def _on_frame(self, frame: StepFrame) -> None:
        self.stats = frame.stats
        self._last_report = perf_counter()
        streams = self._streams
        for event in frame.events:
            # A stream that was cancelled here may still have events on the way.
            is_last = event.finish_reason is not None
            stream = streams.pop(event.stream_id, None) if is_last else streams.get(event.stream_id)
            if stream is not None:
                stream.push(event)
        for failure in frame.failures:
            stream = streams.pop(failure.stream_id, None)
            if stream is not None:
                error = SluiceError(failure.code, failure.message, param=failure.param)
                error.retry_after_s = failure.retry_after_s
                stream.fail(error)

    def _die(self, reason: str) -> None:
        """The engine is gone: every waiter hears of it."""
        if self.failure is not None:
            return
        self.failure = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(SluiceError(ErrorCode.UNAVAILABLE, reason))


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
        arguments = (endpoint, str(os.getpid()), msgspec.json.encode(self.config).decode())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine.process", *arguments, stdin=asyncio.subprocess.DEVNULL
        )
        self._socket.connect(endpoint)
        await self._socket.send(b"")
        exited = asyncio.ensure_future(self._process.wait())
        report = asyncio.ensure_future(self._receive())
        await asyncio.wait((exited, report), return_when=asyncio.FIRST_COMPLETED)
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


class _ThreadCommands:
    """Commands from the event loop's thread to the executor's."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def receive(self, timeout_s: float) -> list[Command]:
        commands: list[Command] = []
        try:
            if timeout_s > 0:
                commands.append(self.queue.get(timeout=timeout_s))
            while True:
                commands.append(self.queue.get_nowait())
        except queue.Empty:
            return commands


class InProcessEngineClient(EngineClient):
    """The executor on a thread of this process: for tests and the smallest set-ups."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        super().__init__(config)
        self._runner = runner
        self._commands = _ThreadCommands()
        self._thread: threading.Thread | None = None
        self.executor: InflightExecutor | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        runner = self._runner
        if runner is None:
            runner = await asyncio.to_thread(load_runner, self.config)

        def emit(frame: StepFrame) -> None:
            self._call(loop, self._on_frame, frame)

        self.executor = InflightExecutor(runner, self.config, self._commands, emit)
        self._info = self.executor.info
        self._thread = threading.Thread(target=self._run, args=(self.executor, runner, loop), name="engine")
        self._thread.start()
        self._last_report = perf_counter()

    def _run(self, executor: InflightExecutor, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        try:
            executor.run()
        except Exception as error:
            log.exception("the engine thread failed")
            self._call(loop, self._die, f"the engine failed: {error}")
        finally:
            runner.close()

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, argument)

    def _send(self, command: Command) -> None:
        self._commands.queue.put(command)

    async def stop(self) -> None:
        if self._thread is not None:
            self._send(Shutdown())
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._die("the engine was stopped")
