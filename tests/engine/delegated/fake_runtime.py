"""A runtime without a model, for the tests of what all delegated runtimes share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from sluice.engine.blocks import HashChain, blocks_for
from sluice.engine.config import EngineConfig
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.executor import DelegatedExecutor
from sluice.engine.delegated.interface import (
    DelegatedRuntime,
    RequestHandle,
    ResponseDelta,
    RuntimeFailure,
    TakeIteration,
    internal_error,
)
from sluice.engine.delegated.sequence import DelegatedSequence
from sluice.engine.frames import Shutdown, StepFrame, Submit
from sluice.engine.statistics import IterationStats
from sluice.engine.types import EngineInfo, FinishReason, GenerateRequest, SamplingParams
from tests.waiting import PATIENCE_S

Frames = asyncio.Queue[StepFrame]

INFO = EngineInfo(
    runtime="fake",
    model_type="llama",
    dtype="bfloat16",
    vocab_size=100,
    eos_token_ids=(2, 3),
    max_model_len=64,
    block_size=4,
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    load_seconds=0.0,
)


class FakeHandle:
    """A request whose first response is its last: one token."""

    def __init__(self) -> None:
        self.is_finished = False
        self.aborted = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        self.is_finished = True
        yield None

    def read(self, response: Any) -> ResponseDelta:
        return ResponseDelta([7], FinishReason.LENGTH)

    def abort(self) -> None:
        self.aborted.set()


class SilentHandle(FakeHandle):
    """A request that nothing ever comes of."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


class EndlessHandle(FakeHandle):
    """A request that only an abort ends."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self.aborted.wait()
        self.is_finished = True
        yield None


class UnreadableHandle(FakeHandle):
    """A request whose responses cannot be read, and go on until it is aborted."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield None
        await self.aborted.wait()

    def read(self, response: Any) -> ResponseDelta:
        raise IndexError("a response without outputs")


class FakeRuntime(DelegatedRuntime):
    """Implements `DelegatedRuntime`. `make_handle` answers each request; it has no statistics."""

    title = "the fake"
    takes_early = True
    sharing = BlockSharing.NONE

    def __init__(self, make_handle: Callable[[GenerateRequest], RequestHandle] = lambda request: FakeHandle()) -> None:
        self._make_handle = make_handle
        self.is_well = True

    async def start(self) -> tuple[EngineInfo, IterationStats | None]:
        return INFO, None

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def submit(self, prepared: GenerateRequest) -> RequestHandle:
        return self._make_handle(prepared)

    def needs_replay(self, request: GenerateRequest) -> bool:
        return request.sampling.grammar is not None

    def worst_case_blocks(self, request: GenerateRequest) -> int:
        return blocks_for(len(request.prompt_token_ids) + request.sampling.max_tokens, INFO.block_size)

    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        return HashChain(request.cache_salt, INFO.block_size)

    def classify(self, error: Exception, *, at_submit: bool) -> RuntimeFailure:
        return RuntimeFailure(internal_error())

    async def is_healthy(self) -> bool:
        return self.is_well

    async def observe(self, take: TakeIteration, is_busy: asyncio.Event) -> None:
        await asyncio.Event().wait()

    def shutdown(self) -> None: ...


def make_request(*prompt: int, max_tokens: int = 1) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id="r", prompt_token_ids=list(prompt), sampling=params)


def make_submit(stream_id: int, *prompt: int) -> Submit:
    return Submit(stream_id, make_request(*prompt))


def make_sequence(stream_id: int, request: GenerateRequest) -> DelegatedSequence:
    return DelegatedSequence(stream_id, request, 0.0, 2, request, INFO.block_size)


@asynccontextmanager
async def running_executor(
    runtime: FakeRuntime, info: EngineInfo = INFO, clock: Callable[[], float] = perf_counter, **limits: Any
) -> AsyncIterator[tuple[DelegatedExecutor, Frames]]:
    """Run an executor over `runtime`: with the queue of what it emits, and until it is told to shut down."""
    frames: Frames = asyncio.Queue()
    executor = DelegatedExecutor(runtime, info, EngineConfig(model_path="", **limits), frames.put_nowait, clock)
    task = asyncio.create_task(executor.run())
    async with asyncio.timeout(PATIENCE_S):
        yield executor, frames
        executor.obey([Shutdown()])
        await task


async def outcomes(frames: Frames, count: int) -> dict[int, Any]:
    """Return of each stream the event with its end, or its failure."""
    ended: dict[int, Any] = {}
    while len(ended) < count:
        frame = await frames.get()
        ended |= {event.stream_id: event for event in frame.events if event.finish_reason is not None}
        ended |= {failure.stream_id: failure for failure in frame.failures}
    return ended
