"""The time that the adapter to TensorRT-LLM adds to a step: from a response in its queue to bytes on a socket.

A stand-in for TensorRT-LLM gives all its outputs a token in one turn of the event loop, as the library's response
thread does. The time of plain readers of the same outputs is subtracted.
"""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

from benchmarks.executor import connected_transport
from benchmarks.figures import BenchmarkError, Figure
from sluice.engine.blocks import HashChain
from sluice.engine.config import EngineConfig
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.executor import DelegatedExecutor
from sluice.engine.delegated.interface import DelegatedRuntime, RuntimeFailure, TakeIteration, internal_error
from sluice.engine.delegated.tensorrt_llm.blocks import blocks_to_completion
from sluice.engine.delegated.tensorrt_llm.responses import LlmRequestHandle
from sluice.engine.frames import Shutdown, Submit
from sluice.engine.process.transport import Transport
from sluice.engine.types import EngineInfo, GenerateRequest, SamplingParams

NUM_STEPS = 400
RUNNING = (16, 64, 256)
_PROMPT_TOKENS = 16
_ABSENT_FIELDS = ("logprobs", "prompt_logprobs", "finish_reason", "stop_reason", "request_perf_metrics")


class Output:
    """A stand-in for RequestOutput: one object, changed in place before each response is read."""

    def __init__(self) -> None:
        self.finished = False
        self.request_perf_metrics = None
        self.cached_tokens = 0
        self.outputs = [SimpleNamespace(token_ids=[], **dict.fromkeys(_ABSENT_FIELDS))]
        self.responses: asyncio.Queue[int] = asyncio.Queue()

    def __aiter__(self) -> "Output":
        return self

    async def __anext__(self) -> "Output":
        self.outputs[0].token_ids.append(await self.responses.get())
        return self

    def abort(self) -> None:
        """Accept the signal and do nothing: no more responses would come."""


class AnsweringRuntime(DelegatedRuntime):
    """TensorRT-LLM's part as a delegated runtime, over outputs that are answered by hand."""

    title = "TensorRT-LLM"
    takes_early = True
    sharing = BlockSharing.AWAITED

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self.outputs: list[Output] = []

    async def start(self) -> tuple[EngineInfo, None]:
        return self._info, None

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def submit(self, prepared: GenerateRequest) -> LlmRequestHandle:
        self.outputs.append(Output())
        return LlmRequestHandle(self.outputs[-1], prepared, self._info.eos_token_ids, self._info.block_size)

    def needs_replay(self, request: GenerateRequest) -> bool:
        return request.sampling.grammar is not None

    def worst_case_blocks(self, request: GenerateRequest) -> int:
        num_prompt, block_size = len(request.prompt_token_ids), self._info.block_size
        return blocks_to_completion(num_prompt, request.sampling.max_tokens, 1, block_size)

    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        return HashChain(request.cache_salt, self._info.block_size)

    def classify(self, error: Exception, *, at_submit: bool) -> RuntimeFailure:
        return RuntimeFailure(internal_error())

    async def is_healthy(self) -> bool:
        return True

    async def observe(self, take: TakeIteration, is_busy: asyncio.Event) -> None:
        await asyncio.Event().wait()

    def shutdown(self) -> None: ...


def measure(num_repeats: int, num_steps: int = NUM_STEPS) -> list[Figure]:
    """Measure one figure for each number of running requests."""
    return [
        Figure(
            f"adapter step, {num_running} running",
            "greedy",
            "ms",
            tuple(_added_ms(num_running, num_steps) for _ in range(num_repeats)),
        )
        for num_running in RUNNING
    ]


def _added_ms(num_running: int, num_steps: int) -> float:
    with connected_transport() as (transport, client):
        whole = asyncio.run(_with_adapter(num_running, num_steps, transport, client))
    return whole - asyncio.run(_with_readers(num_running, num_steps))


async def _with_readers(num_running: int, num_steps: int) -> float:
    outputs, counts = [Output() for _ in range(num_running)], [0] * num_running

    async def read(number: int) -> None:
        async for _ in outputs[number]:
            counts[number] += 1

    tasks = [asyncio.create_task(read(number)) for number in range(num_running)]
    try:
        return await _step_ms(outputs, num_steps, lambda: sum(counts))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _with_adapter(num_running: int, num_steps: int, transport: Transport, client: "zmq.Socket[bytes]") -> float:
    info = _info(num_running, num_steps)
    runtime, num_emitted = AnsweringRuntime(info), 0

    def emit(frame: Any) -> None:
        nonlocal num_emitted
        num_emitted += sum(len(event.token_ids) for event in frame.events)
        transport.emit(frame)

    executor = DelegatedExecutor(runtime, info, EngineConfig(model_path=""), emit)
    running = asyncio.create_task(executor.run())
    for number in range(num_running):
        client.send(msgspec.msgpack.encode(Submit(number, _request(number, num_steps))))

    def is_running() -> bool:
        executor.obey(transport.receive(0.0))
        return len(runtime.outputs) == num_running

    await _until(is_running)
    step_ms = await _step_ms(runtime.outputs, num_steps, lambda: num_emitted)
    executor.obey([Shutdown()])
    await running
    return step_ms


async def _step_ms(outputs: list[Output], num_steps: int, count: Callable[[], int]) -> float:
    started = time.perf_counter()
    for step in range(1, num_steps + 1):
        for output in outputs:
            output.responses.put_nowait(step)
        await _until(lambda step=step: count() == step * len(outputs))  # type: ignore[misc]
    return (time.perf_counter() - started) * 1e3 / num_steps


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 60.0
    while not condition():
        if time.perf_counter() > deadline:
            raise BenchmarkError("a response did not arrive")
        await asyncio.sleep(0)


def _request(number: int, num_steps: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=str(number), prompt_token_ids=[1] * _PROMPT_TOKENS, sampling=sampling)


def _info(num_running: int, num_steps: int) -> EngineInfo:
    blocks_each = (_PROMPT_TOKENS + num_steps) // 32 + 2
    return EngineInfo(
        runtime="null",
        model_type="null",
        dtype="",
        vocab_size=1 << 20,
        eos_token_ids=(),
        max_model_len=_PROMPT_TOKENS + num_steps + 1,
        block_size=32,
        num_blocks=blocks_each * num_running,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        load_seconds=0.0,
    )
