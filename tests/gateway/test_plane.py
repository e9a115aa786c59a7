"""The data plane over a real engine, whose runner has no model but can be held still and broken."""

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
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.health import ServerHealth
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.stream import Generate
from sluice.pipelines.text.types import SamplingOverrides, TextEvent, TextRequest
from sluice.serving.request import InferRequest
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.api.v2.grpc.parts import EchoModel
from tests.gateway.repositories import empty_repository, llm_model
from tests.paths import RILL_TOKENIZER
from tests.pulled import collected, pulled
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
    plane: Plane
    metrics: GatewayMetrics
    engine: InProcessEngineClient
    runner: HeldRunner
    model: LlmText
    loaded: LlmModel

    def serve(self) -> None:
        """End the loading."""
        self.plane.repository.add(self.loaded)
        self.plane.health.begin_serving()

    def stream(self, max_tokens: int = 5, prompt: str = "Hello") -> AsyncGenerator[TextEvent, None]:
        return pulled(self._generate(max_tokens, prompt))

    async def collect(self, max_tokens: int = 5) -> list[TextEvent]:
        return await collected(self._generate(max_tokens, "Hello"))

    def _generate(self, max_tokens: int, prompt: str) -> Generate:
        sampling = SamplingOverrides(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        request = TextRequest(request_id="r", prompt=prompt, sampling=sampling, protocol="test")
        return self.plane.generate(self.model, request)

    def count(self, outcome: str) -> float:
        labels = {"model": "rill", "protocol": "test", "outcome": outcome}
        return sample(self.metrics.registry, "sluice_requests_total", labels)


def sample(registry: CollectorRegistry, name: str, labels: dict[str, str]) -> float:
    return registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def rig(**limits: int) -> AsyncIterator[Rig]:
    """A data plane that is still loading."""
    runner = HeldRunner()
    engine = InProcessEngineClient(msgspec.structs.replace(EngineConfig(model_path=""), **limits), runner)
    await engine.start()
    metrics = GatewayMetrics()
    repository = empty_repository(metrics)
    await repository.start()
    plane = Plane(repository, ServerHealth(repository, HEARTBEAT_TIMEOUT_S))
    model = llm_model("rill", RILL_TOKENIZER, engine, metrics)
    try:
        yield Rig(plane, metrics, engine, runner, model.text, model)
    finally:
        runner.let_go()
        await repository.close(0)
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
        assert it.plane.health.is_live() and not it.plane.health.is_ready()
        assert it.plane.health.why_not_ready() == "the server is loading its models"
        with pytest.raises(SluiceError, match="model 'rill' is not ready: the server is loading its models") as caught:
            it.plane.llm("rill")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        warming = asyncio.create_task(it.model.warm_up())
        await asyncio.sleep(0)
        assert not warming.done()
        it.runner.allow(1)
        await warming
        it.serve()
        assert it.plane.health.is_ready()
        assert it.plane.llms() == [it.plane.llm("rill")] == [it.model]


@on_loop
async def test_a_model_that_is_ready_serves_while_others_are_loading() -> None:
    async with rig() as it:
        it.plane.repository.add(it.loaded)
        assert it.plane.models.find("rill") is it.loaded and it.plane.llm("rill") is it.model
        with pytest.raises(SluiceError, match="model 'late' is not ready: the server is loading its models"):
            it.plane.models.find("late")
        assert not it.plane.health.is_ready()
        it.plane.health.begin_drain()
        with pytest.raises(SluiceError, match="shutting down"):
            it.plane.models.find("rill")


@on_loop
async def test_unknown_models_are_not_found_and_the_known_ones_named() -> None:
    async with rig() as it:
        it.serve()
        with pytest.raises(SluiceError, match="model 'gpt' not found; available: rill") as caught:
            it.plane.llm("gpt")
        assert (caught.value.code, caught.value.param) == (ErrorCode.NOT_FOUND, "model")


@on_loop
async def test_refusals_come_before_the_first_event() -> None:
    async with rig() as it:
        it.serve()
        with pytest.raises(SluiceError) as caught:
            await anext(it.stream(prompt="word " * 9000))
        assert caught.value.code is ErrorCode.INVALID
        assert it.count("invalid") == 1
        assert it.plane.num_open == 0


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
            assert it.plane.num_open == 1
        assert it.plane.num_open == 0
        assert it.count("cancelled") == 1
        it.runner.allow(100)
        assert len(await it.collect(1)) == 1  # the engine obeys in order: the cancel came before this
        assert it.engine.stats.num_running == 0


@on_loop
async def test_a_stream_is_open_from_its_start() -> None:
    async with rig() as it:
        it.serve()
        stream = it.stream()
        assert it.plane.num_open == 0
        await stream.aclose()
        assert await it.plane.wait_idle(PATIENCE_S)
        assert (it.plane.num_open, it.count("cancelled")) == (0, 0)


@on_loop
async def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    async with rig() as it:
        it.serve()
        it.runner.allow(FIRST_STEPS)
        stream = it.stream(50)
        await anext(stream)
        it.plane.health.begin_drain()
        assert it.plane.health.why_not_ready() == "the server is shutting down"
        assert it.plane.health.is_live()
        for refused in (it.collect(), asyncio.to_thread(it.plane.llm, "rill")):
            with pytest.raises(SluiceError, match="the server is shutting down") as caught:
                await refused
            assert caught.value.code is ErrorCode.UNAVAILABLE
        assert not await it.plane.wait_idle(0.01)
        it.runner.allow(100)
        rest = [event async for event in stream]
        assert rest[-1].finish_reason is FinishReason.LENGTH
        assert await it.plane.wait_idle(PATIENCE_S)


@on_loop
async def test_aborting_ends_streams_with_the_error_queued_ones_too() -> None:
    async with rig(max_num_seqs=1) as it:
        it.serve()
        it.runner.allow(FIRST_STEPS)
        running = it.stream(5000)
        await anext(running)
        queued = asyncio.create_task(it.collect())
        await asyncio.sleep(0)
        it.plane.health.begin_drain()
        await it.plane.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "time is up"))
        it.runner.allow(100)
        with pytest.raises(SluiceError, match="time is up"):
            async for _ in running:  # what it had before it was aborted comes first
                pass
        with pytest.raises(SluiceError, match="time is up"):
            await queued
        assert await it.plane.wait_idle(PATIENCE_S)
        assert it.count("unavailable") == 2


@on_loop
async def test_a_silent_engine_is_not_live() -> None:
    async with rig() as it:
        it.engine.heartbeat_age_s = lambda: HEARTBEAT_TIMEOUT_S  # type: ignore[method-assign]
        assert it.plane.health.is_live(), "while loading silence is expected"
        it.serve()
        assert it.plane.health.why_not_live() == "the engine has been silent for 5.0 s"
        assert not it.plane.health.is_ready()


@on_loop
async def test_while_the_engine_restarts_the_server_lives_and_is_not_ready() -> None:
    async with rig() as it:
        it.serve()
        it.runner.allow(100)
        it.engine.is_restarting = True
        assert it.plane.health.is_live()
        assert it.plane.health.why_not_ready() == "the engine is restarting"
        assert it.plane.llm("rill") is it.model, "new requests are taken, and wait"
        it.engine.is_restarting = False
        assert it.plane.health.is_ready()


@on_loop
async def test_a_silent_engine_that_can_be_replaced_is_not_ready_and_no_reason_to_restart_the_server() -> None:
    async with rig() as it:
        it.serve()
        it.engine.can_restart = True
        it.engine.heartbeat_age_s = lambda: HEARTBEAT_TIMEOUT_S  # type: ignore[method-assign]
        assert it.plane.health.is_live()
        assert it.plane.health.why_not_ready() == "the engine has been silent for 5.0 s"


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
        assert not it.plane.health.is_live() and not it.plane.health.is_ready()
        with pytest.raises(SluiceError, match="the engine failed"):
            it.plane.llm("rill")


# --- versions that share requests ---


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    repository = empty_repository(GatewayMetrics())
    plane = Plane(repository, ServerHealth(repository, HEARTBEAT_TIMEOUT_S))
    await repository.start()
    for version in (1, 2):
        repository.add(EchoModel("echo", version=version))
    plane.health.begin_serving()
    yield plane
    await repository.close(0)


async def test_all_of_a_sequence_goes_to_one_version(plane: Plane) -> None:
    plane.repository.set_weights("echo", {1: 1, 2: 1})
    found = plane.models.find("echo")
    chosen = [
        {plane.models.route_sequence(found, InferRequest({}, correlation_id=number)).version for _ in range(5)}
        for number in range(1, 41)
    ]
    assert all(len(versions) == 1 for versions in chosen)
    assert set().union(*chosen) == {1, 2}


async def test_what_says_more_than_the_sequence_is_left_alone(plane: Plane) -> None:
    plane.repository.set_weights("echo", {1: 1})
    found = plane.models.find("echo")
    in_sequence = InferRequest({}, correlation_id=7)
    assert plane.models.route_sequence(found, in_sequence).version == 1
    assert plane.models.route_sequence(found, in_sequence, version=2) is found
    assert plane.models.route_sequence(found, in_sequence, key="client") is found
    assert plane.models.route_sequence(found, InferRequest({})) is found


async def test_weights_of_versions_that_there_are_not(plane: Plane) -> None:
    with pytest.raises(SluiceError, match="version 3 of model 'echo' does not serve; those that do: 1, 2") as caught:
        plane.repository.set_weights("echo", {3: 1})
    assert caught.value.code is ErrorCode.INVALID
    assert not plane.repository.has_weights("echo")
