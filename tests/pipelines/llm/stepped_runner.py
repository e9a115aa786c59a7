"""A runner that echoes, waits until each token is read before it makes the next, and can be held by a test."""

import asyncio
import threading

from sluice.engine.arrays import FloatArray
from sluice.engine.runners.base import StepBatch
from tests.engine.fake_runner import EchoRunner
from tests.waiting import PATIENCE_S

_TURNS = 8
"""Turns of the event loop that a token needs to reach its reader."""


class SteppedRunner(EchoRunner):
    """A runner made on the event loop whose tasks read its tokens."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits, eos_token_ids=(5,))
        self._loop = asyncio.get_running_loop()
        self._may_run = threading.Event()
        self._may_run.set()
        self.error: Exception | None = None
        """Error that every step raises, where it is set."""

    def hold(self) -> None:
        self._may_run.clear()

    def release(self) -> None:
        self._may_run.set()

    def compute(self, batch: StepBatch) -> FloatArray:
        asyncio.run_coroutine_threadsafe(_some_turns(), self._loop).result(PATIENCE_S)
        assert self._may_run.wait(PATIENCE_S), "the test forgot the runner"
        if self.error is not None:
            raise self.error
        return super().compute(batch)


async def _some_turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
