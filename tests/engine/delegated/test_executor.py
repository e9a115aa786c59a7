"""The executor over any runtime: its queue and its deadlines; and unforeseen failures, of which one request's is its
own, and the loop's the engine's end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.executor import DelegatedExecutor
from sluice.engine.delegated.in_flight import ABORT_GRACE_S
from sluice.engine.delegated.interface import EngineLost, RequestHandle
from sluice.engine.frames import (
    AskView,
    Cancel,
    Command,
    Shutdown,
    Sleep,
    SleepMode,
    SleepOutcome,
    StepFrame,
    Submit,
    WakeUp,
)
from sluice.engine.runtime_settings import STALL_SETTING
from sluice.engine.types import BlockSource, FinishReason, GenerateRequest
from sluice.errors import ErrorCode
from tests.clock import ManualClock
from tests.engine.delegated.fake_runtime import (
    INFO,
    EndlessHandle,
    FakeHandle,
    FakeRuntime,
    SilentHandle,
    UnreadableHandle,
    make_request,
    make_submit,
    outcomes,
    running_executor,
)
from tests.waiting import PATIENCE_S, until

UNLUCKY = 13
NUM_HANDED = INFO.max_num_seqs + 1
"""Requests that the runtime gets: one more than can run."""
CONFIG = EngineConfig(model_path="")


class FailingRuntime(FakeRuntime):
    """Fails to prepare a prompt with UNLUCKY, in a way that nothing foresees."""

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        if UNLUCKY in request.prompt_token_ids:
            raise ModuleNotFoundError("No module named 'torch'")
        return request


async def test_a_request_that_cannot_be_prepared_fails_alone() -> None:
    async with running_executor(FailingRuntime()) as (executor, frames):
        executor.obey([make_submit(1, 5), make_submit(2, UNLUCKY), make_submit(3, 6)])
        ended = await outcomes(frames, 3)
    assert ended[2].code is ErrorCode.INTERNAL
    assert ended[1].finish_reason is ended[3].finish_reason is FinishReason.LENGTH


async def test_a_request_may_take_the_whole_cache_and_no_more() -> None:
    most = INFO.num_blocks * INFO.block_size - 1
    async with running_executor(FakeRuntime()) as (executor, frames):
        executor.obey([Submit(each, make_request(1, max_tokens=most + each)) for each in (0, 1)])
        ended = await outcomes(frames, 2)
    assert (ended[0].finish_reason, ended[1].code) == (FinishReason.LENGTH, ErrorCode.INVALID)


async def test_what_was_handed_over_to_a_runtime_that_takes_nothing_over_is_computed() -> None:
    handed = msgspec.structs.replace(make_submit(1, 5), source=BlockSource("tcp://127.0.0.1:1", handover=b"x"))
    async with running_executor(FakeRuntime()) as (executor, frames):
        executor.obey([handed])
        assert (await outcomes(frames, 1))[1].finish_reason is FinishReason.LENGTH


def submit(stream_id: int, **fields: Any) -> Submit:
    return Submit(stream_id, msgspec.structs.replace(make_request(stream_id), **fields))


async def test_deadlines_of_those_who_wait_and_those_who_run() -> None:
    clock = ManualClock(100.0)
    handles = [EndlessHandle() for _ in range(NUM_HANDED)]
    unused = iter(handles)
    async with running_executor(FakeRuntime(lambda request: next(unused)), clock=clock) as (executor, frames):
        running = [submit(each, timeout_s=5.0 if each == 0 else None) for each in range(NUM_HANDED)]
        executor.obey([*running, submit(NUM_HANDED, queue_timeout_s=1.0)])
        await until(lambda: executor.stats().num_waiting == 2)
        ended: dict[int, Any] = {}
        for due in (101.0, 105.0):
            clock.now = due - 0.001
            executor.obey([])
            await asyncio.sleep(0)
            assert executor.stats().timeouts_total == len(ended)
            clock.now = due
            executor.obey([])
            ended |= await outcomes(frames, 1)
    for each, words in ((NUM_HANDED, "waited for longer"), (0, "not complete")):
        assert (ended[each].code, words in ended[each].message) == (ErrorCode.DEADLINE, True)
    assert handles[0].aborted.is_set()


@pytest.mark.parametrize(
    ("waiting", "first"),
    [
        ([{"priority": 1}, {"priority": 1}, {"priority": 0}], [12]),
        ([{"tenant": "small"}] * 4 + [{"tenant": "large"}] * 4, [10, 14, 15, 16]),
    ],
    ids=["by priority", "by the weights of tenants"],
)
async def test_the_queue_is_ours(waiting: list[dict[str, Any]], first: list[int]) -> None:
    handed: list[int] = []

    def answer(request: GenerateRequest) -> FakeHandle:
        [number] = request.prompt_token_ids
        handed.append(number)
        return EndlessHandle() if number < NUM_HANDED else FakeHandle()

    async with running_executor(FakeRuntime(answer), tenant_weights={"large": 3.0}) as (executor, frames):
        executor.obey([submit(each) for each in range(NUM_HANDED)])
        await until(lambda: len(handed) == NUM_HANDED)
        executor.obey([submit(number, **fields) for number, fields in enumerate(waiting, 10)])
        await until(lambda: executor.stats().num_waiting == len(waiting) + 1)
        executor.obey([Cancel(each) for each in range(NUM_HANDED)])
        await outcomes(frames, NUM_HANDED + len(waiting))
    assert handed[NUM_HANDED:][: len(first)] == first


async def test_each_token_is_charged_to_its_tenant() -> None:
    async with running_executor(FakeRuntime()) as (executor, frames):
        executor.view(AskView())
        executor.obey([submit(each, tenant="a") for each in range(3)])
        await outcomes(frames, 3)
        told = executor.view(AskView()).tenants["a"]
    assert (told.prompt, told.generated) == (3, 3)


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


async def test_a_request_whose_response_cannot_be_read_is_aborted_and_counts_nowhere() -> None:
    handle = UnreadableHandle()
    async with running_executor(FakeRuntime(lambda request: handle)) as (executor, frames):
        executor.obey([make_submit(1, 5)])
        assert (await outcomes(frames, 1))[1].code is ErrorCode.INTERNAL
        await handle.aborted.wait()
        await until(lambda: not executor.stats().num_running)
        assert executor.stats().prompt_tokens_total == 0


class LateHandle(FakeHandle):
    """A request whose answer is whole before its last response."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield None
        await self.may_end.wait()
        self.is_finished = True
        yield None


async def test_a_request_holds_its_place_until_its_last_response_and_then_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = LateHandle()
    async with running_executor(FakeRuntime(lambda request: handle)) as (executor, frames):
        executor.obey([make_submit(1, 5)])
        assert (await outcomes(frames, 1))[1].finish_reason is FinishReason.LENGTH
        assert executor.stats().num_running == 1
        handle.may_end.set()
        await until(lambda: not executor.stats().num_running)
    assert "requests that have ended; they are forgotten" not in caplog.text


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
