"""Unforeseen failures: one request's failure is its own, the loop's failure is the engine's end."""

import asyncio

import pytest

from engine.config import EngineConfig
from engine.delegated.executor import DelegatedExecutor
from engine.delegated.in_flight import ABORT_GRACE_S
from engine.delegated.interface import EngineLost, RequestHandle
from engine.delegated.watchdog import STALL_SETTING
from engine.frames import Cancel, Shutdown, StepFrame
from engine.types import FinishReason, GenerateRequest
from sluice.errors import ErrorCode
from tests.engine.delegated.fake_runtime import (
    INFO,
    Clock,
    FakeHandle,
    FakeRuntime,
    SilentHandle,
    UnreadableHandle,
    make_submit,
)

UNLUCKY = 13
TIMEOUT_S = 20.0
CONFIG = EngineConfig(model_path="")


class FailingRuntime(FakeRuntime):
    """Fails to prepare a prompt with UNLUCKY, in a way that nothing foresees."""

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        if UNLUCKY in request.prompt_token_ids:
            raise ModuleNotFoundError("No module named 'torch'")
        return request


async def test_a_request_that_cannot_be_prepared_fails_alone() -> None:
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    executor = DelegatedExecutor(FailingRuntime(), INFO, CONFIG, frames.put_nowait)
    running = asyncio.create_task(executor.run())
    executor.obey([make_submit(1, 5), make_submit(2, UNLUCKY), make_submit(3, 6)])
    ended: dict[int, FinishReason | ErrorCode | None] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while len(ended) < 3:
            frame = await frames.get()
            ended |= {event.stream_id: event.finish_reason for event in frame.events}
            ended |= {failure.stream_id: failure.code for failure in frame.failures}
        executor.obey([Shutdown()])
        await running
    assert ended == {1: FinishReason.LENGTH, 2: ErrorCode.INTERNAL, 3: FinishReason.LENGTH}


async def test_a_loop_that_fails_ends_the_engine() -> None:
    """So that its supervisor starts another: nobody would be served by this one."""

    def emit(frame: StepFrame) -> None:
        if frame.events:
            raise RuntimeError("the socket is gone")

    executor = DelegatedExecutor(FakeRuntime(), INFO, CONFIG, emit)
    running = asyncio.create_task(executor.run())
    executor.obey([make_submit(1, 5)])
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(RuntimeError, match="the socket is gone"):
            await running


async def test_a_request_whose_response_cannot_be_read_is_aborted() -> None:
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    handle = UnreadableHandle()
    executor = DelegatedExecutor(FakeRuntime(lambda request: handle), INFO, CONFIG, frames.put_nowait)
    running = asyncio.create_task(executor.run())
    executor.obey([make_submit(1, 5)])
    async with asyncio.timeout(TIMEOUT_S):
        while not (failures := (await frames.get()).failures):
            pass
        assert failures[0].code is ErrorCode.INTERNAL
        await handle.aborted.wait()
        executor.obey([Shutdown()])
        await running


class HangingRuntime(FakeRuntime):
    """Answers nothing of prompts with UNLUCKY, not even their abort; of others only where it `goes_on`."""

    def __init__(self, *, goes_on: bool) -> None:
        super().__init__(self._answer)
        self._goes_on = goes_on
        self.begun, self.probed = asyncio.Event(), asyncio.Event()

    def _answer(self, request: GenerateRequest) -> RequestHandle:
        self.begun.set()
        if request.request_id == "probe":
            self.probed.set()
        return FakeHandle() if self._goes_on and UNLUCKY not in request.prompt_token_ids else SilentHandle()


async def forget_an_aborted_request(runtime: HangingRuntime) -> tuple[DelegatedExecutor, "asyncio.Task[None]"]:
    clock = Clock()
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    config = EngineConfig(model_path="", runtime_settings={STALL_SETTING: "0.2"})
    executor = DelegatedExecutor(runtime, INFO, config, frames.put_nowait, clock)
    running = asyncio.create_task(executor.run())
    executor.obey([make_submit(1, UNLUCKY)])
    await runtime.begun.wait()
    executor.obey([Cancel(1)])
    while not (await frames.get()).events:
        pass
    clock.now += 2 * ABORT_GRACE_S
    return executor, running


async def test_an_engine_that_hangs_with_nobody_left_is_found_out() -> None:
    async with asyncio.timeout(TIMEOUT_S):
        _, running = await forget_an_aborted_request(HangingRuntime(goes_on=False))
        with pytest.raises(EngineLost, match="an aborted request did not end, and no token came"):
            await running


async def test_one_that_only_forgets_to_end_an_aborted_request_goes_on() -> None:
    async with asyncio.timeout(TIMEOUT_S):
        runtime = HangingRuntime(goes_on=True)
        executor, running = await forget_an_aborted_request(runtime)
        while executor.stats().num_running:
            await asyncio.sleep(0)
        await runtime.probed.wait()
        assert not running.done()
        executor.obey([Shutdown()])
        await running
