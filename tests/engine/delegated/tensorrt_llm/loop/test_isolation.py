"""What no rule foresees: one request's failure is its own, the loop's failure is the engine's end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.loop.executor import TensorRtLlmExecutor
from engine.delegated.tensorrt_llm.loop.failures import EngineLost
from engine.delegated.tensorrt_llm.loop.inside import ABORT_GRACE_S
from engine.delegated.tensorrt_llm.loop.llm import Call, Llm
from engine.delegated.tensorrt_llm.loop.watch import STALL_SETTING
from engine.frames import Cancel, Shutdown, StepFrame, Submit
from engine.types import FinishReason, GenerateRequest, SamplingParams
from sluice.errors import ErrorCode
from tests.engine.delegated.tensorrt_llm.loop.test_events import INFO, Completion

UNLUCKY = 13
PATIENCE_S = 20.0


class Output:
    """A RequestOutput whose first response is its last: one token."""

    finished = False

    def __init__(self) -> None:
        self.outputs = [Completion([7], finish_reason="length")]

    async def __aiter__(self) -> AsyncIterator["Output"]:
        self.finished = True
        yield self

    def abort(self) -> None:
        """It is over."""


class Silent(Output):
    """Nothing ever comes of it."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        await asyncio.Event().wait()
        yield self


class Library:
    """Fails to prepare a prompt with UNLUCKY, in a way that nothing foresees."""

    has_kv_cache_events = False

    def prepare(self, request: GenerateRequest) -> Call:
        if UNLUCKY in request.prompt_token_ids:
            raise ModuleNotFoundError("No module named 'torch'")
        return Call(request.prompt_token_ids, {})

    def generate(self, call: Call) -> Output:
        return Output()

    def is_healthy(self) -> bool:
        return True

    async def statistics(self) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}


def submit(stream_id: int, *prompt: int) -> Submit:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return Submit(stream_id, GenerateRequest(request_id="r", prompt_token_ids=list(prompt), sampling=params))


async def test_a_request_that_cannot_be_prepared_fails_alone() -> None:
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    executor = TensorRtLlmExecutor(cast(Llm, Library()), INFO, EngineConfig(model_path=""), frames.put_nowait)
    running = asyncio.create_task(executor.run())
    executor.obey([submit(1, 5), submit(2, UNLUCKY), submit(3, 6)])
    ended: dict[int, FinishReason | ErrorCode | None] = {}
    async with asyncio.timeout(PATIENCE_S):
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

    executor = TensorRtLlmExecutor(cast(Llm, Library()), INFO, EngineConfig(model_path=""), emit)
    running = asyncio.create_task(executor.run())
    executor.obey([submit(1, 5)])
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="the socket is gone"):
            await running


class Unreadable(Output):
    """Its responses lack what every one has, and go on until it is aborted."""

    def __init__(self) -> None:
        self.outputs: list[Completion] = []
        self.aborted = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Output]:
        yield self
        await self.aborted.wait()

    def abort(self) -> None:
        self.aborted.set()


async def test_a_request_whose_response_cannot_be_read_is_aborted() -> None:
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    output = Unreadable()
    library = Library()
    library.generate = lambda call: output  # type: ignore[method-assign]
    executor = TensorRtLlmExecutor(cast(Llm, library), INFO, EngineConfig(model_path=""), frames.put_nowait)
    running = asyncio.create_task(executor.run())
    executor.obey([submit(1, 5)])
    async with asyncio.timeout(PATIENCE_S):
        while not (failures := (await frames.get()).failures):
            pass
        assert failures[0].code is ErrorCode.INTERNAL
        await output.aborted.wait()
        executor.obey([Shutdown()])
        await running


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Hanging(Library):
    """Answers nothing of prompts with UNLUCKY, not even their abort; of others only where it `goes_on`."""

    def __init__(self, *, goes_on: bool) -> None:
        self._goes_on = goes_on
        self.begun, self.probed = asyncio.Event(), asyncio.Event()

    def prepare(self, request: GenerateRequest) -> Call:
        if request.request_id == "probe":
            self.probed.set()
        return Call(request.prompt_token_ids, {})

    def generate(self, call: Call) -> Output:
        self.begun.set()
        return Output() if self._goes_on and UNLUCKY not in call.inputs else Silent()


async def forget_an_aborted_request(library: Hanging) -> tuple[TensorRtLlmExecutor, "asyncio.Task[None]"]:
    clock = Clock()
    frames: asyncio.Queue[StepFrame] = asyncio.Queue()
    config = EngineConfig(model_path="", runtime_settings={STALL_SETTING: "0.2"})
    executor = TensorRtLlmExecutor(cast(Llm, library), INFO, config, frames.put_nowait, clock)
    running = asyncio.create_task(executor.run())
    executor.obey([submit(1, UNLUCKY)])
    await library.begun.wait()
    executor.obey([Cancel(1)])
    while not (await frames.get()).events:
        pass
    clock.now += 2 * ABORT_GRACE_S
    return executor, running


async def test_an_engine_that_hangs_with_nobody_left_is_found_out() -> None:
    async with asyncio.timeout(PATIENCE_S):
        _, running = await forget_an_aborted_request(Hanging(goes_on=False))
        with pytest.raises(EngineLost, match="an aborted request did not end, and no token came"):
            await running


async def test_one_that_only_forgets_to_end_an_aborted_request_goes_on() -> None:
    async with asyncio.timeout(PATIENCE_S):
        library = Hanging(goes_on=True)
        executor, running = await forget_an_aborted_request(library)
        while executor.stats().num_running:
            await asyncio.sleep(0)
        await library.probed.wait()
        assert not running.done()
        executor.obey([Shutdown()])
        await running
