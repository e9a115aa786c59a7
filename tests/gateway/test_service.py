"""The service over a real engine, whose runner has no model but can be held still and broken."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import StepBatch
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.service import InferenceService
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.types import SamplingOverrides, TextEvent, TextRequest
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.repositories import empty_repository, llm_model
from tests.paths import RILL_TOKENIZER
from tests.waiting import PATIENCE_S

HEARTBEAT_TIMEOUT_S = 5.0
FIRST_STEPS = 10
"""Enough for a first event, whatever part of a character the first tokens are."""


class HeldRunner(EchoRunner):
    """Runs as many steps as `allow` permits."""

    def __init__(self) -> None:
        super().__init__(max_model_len=8192, num_blocks=512)
        self._steps = threading.Semaphore(0)
        self._is_free = False

    def let_go(self) -> None:
        """Allow all steps."""
        self._is_free = True
        self.allow(1)

    def allow(self, num_steps: int) -> None:
        self._steps.release(num_steps)

    def compute(self, batch: StepBatch) -> FloatArray:
        assert self._is_free or self._steps.acquire(timeout=PATIENCE_S), "the test forgot the runner"
        return super().compute(batch)


@dataclass
class Rig:
    service: InferenceService
    engine: InProcessEngineClient
    runner: HeldRunner
    model: LlmText
    loaded: LlmModel

    def serve(self) -> None:
        """End the loading."""
        self.service.repository.add(self.loaded)
        self.service.begin_serving()

    def stream(self, max_tokens: int = 5, prompt: str = "Hello") -> AsyncGenerator[TextEvent, None]:
        sampling = SamplingOverrides(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        request = TextRequest(request_id="r", prompt=prompt, sampling=sampling, protocol="test")
        return self.service.generate(self.model, request)

    async def collect(self, max_tokens: int = 5) -> list[TextEvent]:
        return [event async for event in self.stream(max_tokens)]

    def count(self, outcome: str) -> float:
        labels = {"model": "rill", "protocol": "test", "outcome": outcome}
        return sample(self.service.metrics.registry, "sluice_requests_total", labels)


def sample(registry: CollectorRegistry, name: str, labels: dict[str, str]) -> float:
    return registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def rig(**limits: int) -> AsyncIterator[Rig]:
    """A service that is still loading."""
    runner = HeldRunner()
    engine = InProcessEngineClient(msgspec.structs.replace(EngineConfig(model_path=""), **limits), runner)
    await engine.start()
    metrics = GatewayMetrics()
    repository = empty_repository(metrics)
    await repository.start()
    service = InferenceService(repository, metrics, HEARTBEAT_TIMEOUT_S)
    model = llm_model("rill", RILL_TOKENIZER, engine, metrics)
    try:
        yield Rig(service, engine, runner, model.text, model)
    finally:
        runner.let_go()
        await service.close()
        await engine.stop()


def on_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an async test, with a deadline."""

    def run() -> None:
        async def limited() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test()

        asyncio.run(limited())

    run.__name__ = test.__name__
    return run


@on_loop
async def test_ready_only_after_the_model_has_generated() -> None:
    async with rig() as it:
        assert it.service.is_live() and not it.service.is_ready()
        assert it.service.readiness().reason == "the server is loading its models"
        with pytest.raises(SluiceError, match="model 'rill' is not ready: the server is loading its models") as caught:
            it.service.llm("rill")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        warming = asyncio.create_task(it.model.warm_up())
        await asyncio.sleep(0)
        assert not warming.done()
        it.runner.allow(1)
        await warming
        it.serve()
        assert it.service.is_ready()
        assert it.service.llms() == [it.service.llm("rill")] == [it.model]


@on_loop
async def test_a_model_that_is_ready_serves_while_others_are_loading() -> None:
    async with rig() as it:
        it.service.repository.add(it.loaded)
        assert it.service.find("rill") is it.loaded and it.service.llm("rill") is it.model
        with pytest.raises(SluiceError, match="model 'late' is not ready: the server is loading its models"):
            it.service.find("late")
        assert not it.service.is_ready()
        it.service.begin_drain()
        with pytest.raises(SluiceError, match="shutting down"):
            it.service.find("rill")


@on_loop
async def test_unknown_models_are_not_found_and_the_known_ones_named() -> None:
    async with rig() as it:
        it.serve()
        with pytest.raises(SluiceError, match="model 'gpt' not found; available: rill") as caught:
            it.service.llm("gpt")
        assert (caught.value.code, caught.value.param) == (ErrorCode.NOT_FOUND, "model")


@on_loop
async def test_refusals_come_before_the_first_event() -> None:
    async with rig() as it:
        it.serve()
        with pytest.raises(SluiceError) as caught:
            await anext(it.stream(prompt="word " * 9000))
        assert caught.value.code is ErrorCode.INVALID
        assert it.count("invalid") == 1
        assert it.service.num_open == 0


@on_loop
async def test_a_full_queue_refuses() -> None:
    async with rig(max_num_seqs=1, max_queued_requests=0) as it:
        it.serve()
        async with aclosing(it.stream(50)) as first:
            it.runner.allow(FIRST_STEPS)
            await anext(first)
            second = asyncio.create_task(it.collect())
            await asyncio.sleep(0)  # it is on its way to the engine
            it.runner.allow(1)
            with pytest.raises(SluiceError) as caught:
                await second
        assert caught.value.code is ErrorCode.OVERLOADED
        assert it.count("overloaded") == 1


@on_loop
async def test_closing_a_stream_cancels_it_in_the_engine() -> None:
    async with rig() as it:
        it.serve()
        it.runner.allow(FIRST_STEPS)
        async with aclosing(it.stream(5000)) as stream:
            await anext(stream)
            assert it.service.num_open == 1
        assert it.service.num_open == 0
        assert it.count("cancelled") == 1
        it.runner.allow(100)
        assert len(await it.collect(1)) == 1  # the engine obeys in order: the cancel came before this
        assert it.engine.stats.num_running == 0


@on_loop
async def test_a_stream_is_open_from_its_start() -> None:
    async with rig() as it:
        it.serve()
        stream = it.stream()
        assert it.service.num_open == 0
        await stream.aclose()
        assert await it.service.wait_idle(PATIENCE_S)
        assert (it.service.num_open, it.count("cancelled")) == (0, 0)


@on_loop
async def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    async with rig() as it:
        it.serve()
        it.runner.allow(FIRST_STEPS)
        stream = it.stream(50)
        await anext(stream)
        it.service.begin_drain()
        assert it.service.readiness().reason == "the server is shutting down"
        assert it.service.is_live()
        for refused in (it.collect(), asyncio.to_thread(it.service.llm, "rill")):
            with pytest.raises(SluiceError, match="the server is shutting down") as caught:
                await refused
            assert caught.value.code is ErrorCode.UNAVAILABLE
        assert not await it.service.wait_idle(0.01)
        it.runner.allow(100)
        rest = [event async for event in stream]
        assert rest[-1].finish_reason is FinishReason.LENGTH
        assert await it.service.wait_idle(PATIENCE_S)


@on_loop
async def test_aborting_ends_streams_with_the_error_queued_ones_too() -> None:
    async with rig(max_num_seqs=1) as it:
        it.serve()
        it.runner.allow(FIRST_STEPS)
        running = it.stream(5000)
        await anext(running)
        queued = asyncio.create_task(it.collect())
        await asyncio.sleep(0)
        it.service.begin_drain()
        await it.service.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "time is up"))
        it.runner.allow(100)
        with pytest.raises(SluiceError, match="time is up"):
            async for _ in running:  # what it had before it was aborted comes first
                pass
        with pytest.raises(SluiceError, match="time is up"):
            await queued
        assert await it.service.wait_idle(PATIENCE_S)
        assert it.count("unavailable") == 2


@on_loop
async def test_a_silent_engine_is_not_live() -> None:
    async with rig() as it:
        it.engine.heartbeat_age_s = lambda: HEARTBEAT_TIMEOUT_S  # type: ignore[method-assign]
        assert it.service.is_live(), "while loading silence is expected"
        it.serve()
        assert it.service.liveness().reason == "the engine has been silent for 5.0 s"
        assert not it.service.is_ready()


@on_loop
async def test_while_the_engine_restarts_the_server_lives_and_is_not_ready() -> None:
    async with rig() as it:
        it.serve()
        it.runner.allow(100)
        it.engine.is_restarting = True
        assert it.service.is_live()
        assert it.service.readiness().reason == "the engine is restarting"
        assert it.service.llm("rill") is it.model, "new requests are taken, and wait"
        it.engine.is_restarting = False
        assert it.service.is_ready()


@on_loop
async def test_a_silent_engine_that_can_be_replaced_is_not_ready_and_no_reason_to_restart_the_server() -> None:
    async with rig() as it:
        it.serve()
        it.engine.can_restart = True
        it.engine.heartbeat_age_s = lambda: HEARTBEAT_TIMEOUT_S  # type: ignore[method-assign]
        assert it.service.is_live()
        assert it.service.readiness().reason == "the engine has been silent for 5.0 s"


@on_loop
async def test_a_dead_engine_fails_its_streams_and_the_probes() -> None:
    async with rig() as it:
        it.serve()
        it.runner.allow(FIRST_STEPS)
        stream = it.stream(5000)
        await anext(stream)
        it.runner.let_go()
        await it.engine.stop()
        with pytest.raises(SluiceError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert not it.service.is_live() and not it.service.is_ready()
        with pytest.raises(SluiceError, match="the engine failed"):
            it.service.llm("rill")
