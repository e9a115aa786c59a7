"""Unforeseen failures: one request's failure is its own, the loop's failure is the engine's end."""

import asyncio

import msgspec
import pytest

from engine.config import EngineConfig
from engine.delegated.executor import DelegatedExecutor
from engine.delegated.in_flight import ABORT_GRACE_S
from engine.delegated.interface import EngineLost, RequestHandle
from engine.delegated.watchdog import STALL_SETTING
from engine.frames import Cancel, Command, Shutdown, Sleep, SleepMode, SleepOutcome, StepFrame, WakeUp
from engine.types import BlockSource, FinishReason, GenerateRequest
from sluice.errors import ErrorCode
from tests.clock import ManualClock
from tests.engine.delegated.fake_runtime import (
    INFO,
    FakeHandle,
    FakeRuntime,
    SilentHandle,
    UnreadableHandle,
    make_submit,
)
from tests.waiting import PATIENCE_S, until

UNLUCKY = 13
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
    async with asyncio.timeout(PATIENCE_S):
        while len(ended) < 3:
            frame = await frames.get()
            ended |= {event.stream_id: event.finish_reason for event in frame.events}
            ended |= {failure.stream_id: failure.code for failure in frame.failures}
        executor.obey([Shutdown()])
        await running
    assert ended == {1: FinishReason.LENGTH, 2: ErrorCode.INTERNAL, 3: FinishReason.LENGTH}


async def test_what_was_handed_over_to_a_runtime_that_takes_nothing_over_is_computed() -> None:
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    executor = DelegatedExecutor(FakeRuntime(), INFO, CONFIG, frames.put_nowait)
    running = asyncio.create_task(executor.run())
    executor.obey([msgspec.structs.replace(make_submit(1, 5), source=BlockSource("tcp://127.0.0.1:1", handover=b"x"))])
    async with asyncio.timeout(PATIENCE_S):
        while not (events := (await frames.get()).events):
            pass
        executor.obey([Shutdown()])
        await running
    assert [each.stream_id for each in events] == [1]


async def test_a_loop_that_fails_ends_the_engine() -> None:
    """So that its supervisor starts another: nobody would be served by this one."""

    def emit(frame: StepFrame) -> None:
        if frame.events:
            raise RuntimeError("the socket is gone")

    executor = DelegatedExecutor(FakeRuntime(), INFO, CONFIG, emit)
    running = asyncio.create_task(executor.run())
    executor.obey([make_submit(1, 5)])
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="the socket is gone"):
            await running


async def test_a_request_whose_response_cannot_be_read_is_aborted() -> None:
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    handle = UnreadableHandle()
    executor = DelegatedExecutor(FakeRuntime(lambda request: handle), INFO, CONFIG, frames.put_nowait)
    running = asyncio.create_task(executor.run())
    executor.obey([make_submit(1, 5)])
    async with asyncio.timeout(PATIENCE_S):
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
    clock = ManualClock(100.0)
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
    async with asyncio.timeout(PATIENCE_S):
        _, running = await forget_an_aborted_request(HangingRuntime(goes_on=False))
        with pytest.raises(EngineLost, match="an aborted request did not end, and no token came"):
            await running


async def test_one_that_only_forgets_to_end_an_aborted_request_goes_on() -> None:
    async with asyncio.timeout(PATIENCE_S):
        runtime = HangingRuntime(goes_on=True)
        executor, running = await forget_an_aborted_request(runtime)
        await until(lambda: not executor.stats().num_running)
        await runtime.probed.wait()
        assert not running.done()
        executor.obey([Shutdown()])
        await running


class SleepyRuntime(FakeRuntime):
    """Sleeps and wakes; it does not answer prompts with UNLUCKY. A sleep of level 2 fails."""

    def __init__(self) -> None:
        super().__init__(lambda request: self.silent if UNLUCKY in request.prompt_token_ids else FakeHandle())
        self.silent = SilentHandle()
        self.num_checks = 0

    def check_sleep(self, level: int, mode: SleepMode) -> None: ...

    async def sleep(self, level: int, mode: SleepMode) -> None:
        if level == 2:
            raise RuntimeError("out of memory")

    async def wake_up(self, tags: list[str] | None) -> bool:
        return tags is None

    async def is_healthy(self) -> bool:
        self.num_checks += 1
        return True


class Sleeper:
    """An executor over a runtime, and what it has emitted."""

    def __init__(self, runtime: FakeRuntime, clock: ManualClock[float]) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        """As they are sent: what changes in them afterwards reaches nobody."""
        config = EngineConfig(model_path="", runtime_settings={STALL_SETTING: "0.2"})
        self.executor = DelegatedExecutor(
            runtime, INFO, config, lambda frame: self.frames.put_nowait(msgspec.msgpack.encode(frame)), clock
        )
        self.running = asyncio.create_task(self.executor.run())
        self.ended: dict[int, FinishReason | ErrorCode | None] = {}

    async def ask(self, command: Command) -> SleepOutcome:
        """Send a command about sleep, and return the answer."""
        self.executor.obey([command])
        while not (outcomes := (await self._take()).sleep):
            pass
        return outcomes[0]

    async def end(self, stream_id: int) -> FinishReason | ErrorCode | None:
        while stream_id not in self.ended:
            await self._take()
        return self.ended[stream_id]

    async def stop(self) -> None:
        self.executor.obey([Shutdown()])
        await self.running

    async def _take(self) -> StepFrame:
        frame = msgspec.msgpack.decode(await self.frames.get(), type=StepFrame)
        self.ended |= {event.stream_id: event.finish_reason for event in frame.events}
        self.ended |= {failure.stream_id: failure.code for failure in frame.failures}
        return frame


async def test_requests_wait_while_the_runtime_sleeps() -> None:
    runtime = SleepyRuntime()
    async with asyncio.timeout(PATIENCE_S):
        it = Sleeper(runtime, ManualClock(100.0))
        it.executor.obey([make_submit(1, UNLUCKY)])
        assert await it.ask(Sleep(1, "abort")) == SleepOutcome(is_sleeping=True)
        assert (await it.end(1), runtime.silent.aborted.is_set()) == (ErrorCode.UNAVAILABLE, True)
        it.executor.obey([make_submit(2, 5)])
        assert await it.ask(WakeUp(["weights"])) == SleepOutcome(is_sleeping=True)
        assert 2 not in it.ended
        assert it.executor.stats().num_waiting == 1
        assert await it.ask(WakeUp()) == SleepOutcome(is_sleeping=False)
        assert await it.end(2) is FinishReason.LENGTH
        await it.stop()


async def test_a_sleeping_runtime_is_no_hanging_one() -> None:
    runtime, clock = SleepyRuntime(), ManualClock(100.0)
    async with asyncio.timeout(PATIENCE_S):
        it = Sleeper(runtime, clock)
        it.executor.obey([make_submit(1, UNLUCKY)])
        assert (await it.ask(Sleep(1, "keep"))).is_sleeping
        clock.now += 1000.0
        seen = runtime.num_checks
        await until(lambda: runtime.num_checks >= seen + 3)
        assert not it.running.done()
        await it.ask(WakeUp())
        clock.now += 1000.0
        with pytest.raises(EngineLost, match="has brought no token"):
            await it.running


async def test_a_sleep_that_fails_leaves_the_runtime_awake() -> None:
    async with asyncio.timeout(PATIENCE_S):
        for runtime, code in ((SleepyRuntime(), ErrorCode.INTERNAL), (FakeRuntime(), ErrorCode.UNIMPLEMENTED)):
            it = Sleeper(runtime, ManualClock(100.0))
            outcome = await it.ask(Sleep(2, "wait"))
            assert (outcome.code, outcome.is_sleeping) == (code, False)
            it.executor.obey([make_submit(1, 5)])
            assert await it.end(1) is FinishReason.LENGTH
            await it.stop()
