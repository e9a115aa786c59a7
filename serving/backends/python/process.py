"""A worker process, from its start to its end."""

import asyncio
import contextvars
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import from_process
from sluice.serving.backends.python import frames
from sluice.serving.backends.python.connection import WorkerConnection
from sluice.serving.backends.python.environments import WorkerLaunch
from sluice.serving.backends.python.output import PrintedOutput
from sluice.serving.backends.python.shared_memory import BatchProgress, create_progress_file

log = logging.getLogger(__name__)

_START_SCRIPT = Path(__file__).parent / "worker" / "start.py"

WorkerMessage = frames.WorkerReport | frames.ServiceRequest
"""Messages from a worker that has started."""


class PythonWorkerProcess:
    """Runs one worker process, once. What the model prints goes to the log. Event loop's thread only."""

    def __init__(self, name: str, launch: WorkerLaunch, on_message: Callable[[WorkerMessage], None]) -> None:
        self._name = name
        self._launch = launch
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self.connection = WorkerConnection(name, self._receive, self._handle_disconnect)
        self._progress: BatchProgress | None = None
        self._is_ending = False
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._result: asyncio.Future[frames.Initialized | frames.ConfigCompleted | frames.CommandFailed] = (
            self._loop.create_future()
        )
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Exit code, negative for a signal. Set once the last messages have been handled."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def num_begun(self) -> int:
        """Batches that the model was given. Remains valid after the process has ended."""
        return self._progress.num_begun if self._progress is not None else 0

    async def run(self, command: frames.Command) -> frames.Initialized | frames.ConfigCompleted:
        """Start the process, and return its first response. Raises INTERNAL with the model's reason, or its end."""
        await self._start()
        self.connection.send(command)
        await self._wait_started()
        await asyncio.wait((self._result, self.exited), return_when=asyncio.FIRST_COMPLETED)
        if not self._result.done():
            raise SluiceError(ErrorCode.INTERNAL, unhealthy_message(self._name))
        response = self._result.result()
        if isinstance(response, frames.CommandFailed):
            raise SluiceError(ErrorCode.INTERNAL, response.message)
        return response

    async def _start(self) -> None:
        progress_fd = create_progress_file()
        output = PrintedOutput(self._name)
        try:
            self._progress = BatchProgress(progress_fd)
            fds = (self.connection.far_fd, progress_fd)
            self._process = await asyncio.create_subprocess_exec(
                *self._launch.arguments(_START_SCRIPT, *fds),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.far_fd,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=fds,
                # Ctrl-C in a terminal is for the server; and processes that the model starts end with their session.
                start_new_session=True,
            )
        except OSError as error:
            message = f"{self._name} cannot be started with '{self._launch.interpreter.executable}': {error}"
            raise SluiceError(ErrorCode.INTERNAL, message) from None
        finally:
            os.close(progress_fd)
            os.close(output.far_fd)
            if self._process is None:
                output.close()
        # What the process says is not about the request that has loaded the model, whose id is in this context.
        context = contextvars.Context()
        context.run(self.connection.start)
        context.run(output.start)
        self._watcher = self._loop.create_task(self._watch(self._process, output), context=context)

    async def _wait_started(self) -> None:
        """Wait until the process has come up, but not for the loading of the model, which may take any time."""
        limit_s = self._launch.start_timeout_s
        await asyncio.wait((self._started, self.exited), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done() and not self.exited.done():
            raise SluiceError(
                ErrorCode.INTERNAL, f"Timed out after {limit_s:g} s: the process '{self._name}' is not up"
            )

    async def _watch(self, process: asyncio.subprocess.Process, output: PrintedOutput) -> None:
        code = await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self.connection.read_rest()
        self.connection.close()
        output.close(is_failure=code != 0)
        self.exited.set_result(code)

    def _receive(self, message: frames.Message) -> None:
        match message:
            case (
                frames.WorkerReport()
                | frames.CallModel()
                | frames.CancelCall()
                | frames.ServerCall()
                | frames.ReleaseMetrics()
            ):
                self._on_message(message)
            case frames.WorkerLogLine(level, location, text):
                log.log(level, "[%s %s] %s", self._name, location, text, extra=from_process(self._name))
            case frames.WorkerStarted():
                if not self._started.done():
                    self._started.set_result(None)
            case frames.Initialized() | frames.ConfigCompleted() | frames.CommandFailed():
                if not self._result.done():
                    self._result.set_result(message)

    def _handle_disconnect(self) -> None:
        if not self._is_ending:
            self.kill()

    def kill(self) -> None:
        """Kill the process and the processes that it started. Idempotent."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self, timeout_s: float) -> None:
        """Let the model finalize for at most `timeout_s`, and end the process. Idempotent."""
        if self._process is None:
            self.connection.close()
            return
        if not self._is_ending:
            self._is_ending = True
            self.connection.send(frames.Finalize())
            await asyncio.wait((self.exited,), timeout=timeout_s)
            if not self.exited.done():
                log.warning("%s did not end within %g s; killing it", self._name, timeout_s)
                self.kill()
        await asyncio.wait((self.exited,))


def unhealthy_message(name: str) -> str:
    """Return Triton's message for a process that has ended."""
    return f"Stub process '{name}' is not healthy."


def describe_exit(code: int) -> str:
    """Describe an exit code for the log."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
