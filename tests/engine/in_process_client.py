"""The client of an engine on a thread of the test's process."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from sluice.engine.client.base import EngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Command, Shutdown, StepFrame
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.loop.load import load_draft_runner, load_runner
from sluice.engine.runners.base import Runner

log = logging.getLogger(__name__)


class _ThreadCommands:
    """Passes commands from the event loop's thread to the executor's."""

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
    """The client of an executor on a thread of this process.

    A step that raises fails only its own requests. An exception in the loop itself ends the engine. It is not replaced,
    because a thread cannot be killed and its state cannot be trusted; `failure` then has the reason.
    """

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
        draft_runner = await asyncio.to_thread(load_draft_runner, self.config, runner.info)

        def emit(frame: StepFrame) -> None:
            self._call(loop, self._on_frame, frame)

        self.executor = InflightExecutor(runner, self.config, self._commands.receive, emit, draft_runner=draft_runner)
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
