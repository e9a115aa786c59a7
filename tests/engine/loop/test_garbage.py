"""What a step leaves to the garbage collector: nothing. A collection over many sequences would stop every stream."""

import gc
from collections.abc import Iterator

import msgspec
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.frames import Command, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.process.bootstrap import collect_rarely
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import GenerateRequest, TokenEvent
from tests.engine.fake_runner import EchoRunner
from tests.engine.parts import make_request

NUM_RUNNING, NUM_STEPS = 40, 200
MANY_RUNNING = 900
"""More than the new objects at which Python collects by default."""


class Burst:
    """All requests at once, then none."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._commands: list[Command] = [Submit(number, request) for number, request in enumerate(requests)]

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands


@pytest.fixture
def counting() -> Iterator[None]:
    """Count objects without collecting any."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    collect_rarely()
    yield
    gc.set_threshold(*before)


def decoding(num_running: int) -> InflightExecutor:
    """Return an executor whose sequences all decode, for many steps."""
    requests = [make_request([number, 2, 3], max_tokens=300) for number in range(num_running)]
    config = EngineConfig(model_path="", max_num_seqs=num_running, max_num_batched_tokens=4 * num_running)
    executor = InflightExecutor(
        EchoRunner(num_blocks=10 * num_running), config, Burst(requests).receive, lambda frame: None
    )
    while executor.stats().num_running < num_running or executor.stats().num_waiting:
        executor.step()
    return executor


@pytest.mark.usefixtures("counting")
def test_a_step_leaves_no_objects_behind() -> None:
    executor = decoding(NUM_RUNNING)
    growths = []
    for _ in range(3):  # threads of other tests may make objects meanwhile, though hardly each time
        before = len(gc.get_objects())
        for _ in range(NUM_STEPS // 3):
            executor.step()
        growths.append(len(gc.get_objects()) - before)
    assert executor.stats().num_running == NUM_RUNNING
    assert min(growths) < NUM_RUNNING, f"of {NUM_STEPS // 3 * NUM_RUNNING} tokens"


@pytest.mark.usefixtures("rare_collections")
def test_steps_alone_start_no_collection() -> None:
    executor = decoding(MANY_RUNNING)
    gc.collect()
    collections: list[str] = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        for _ in range(20):
            executor.step()
    finally:
        gc.callbacks.pop()
    assert executor.stats().num_running == MANY_RUNNING
    assert collections == []


@pytest.mark.usefixtures("counting")
def test_finished_sequences_are_freed_without_the_collector() -> None:
    requests = [make_request([number, 2], max_tokens=3) for number in range(NUM_RUNNING)]
    executor = InflightExecutor(EchoRunner(), EngineConfig(model_path=""), Burst(requests).receive, lambda frame: None)
    before = num_alive()
    executor.step()
    assert num_alive() > before
    while executor.stats().num_running:
        executor.step()
    assert num_alive() <= before


def num_alive() -> int:
    return sum(isinstance(each, SamplingState) for each in gc.get_objects())


def test_the_collector_does_not_follow_what_streams_carry() -> None:
    request = make_request([1, 2, 3], max_tokens=5)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(1, request)), type=Submit)
    for each in (decoded, decoded.request, decoded.request.sampling, TokenEvent(1, [2])):
        assert not gc.is_tracked(each), type(each)
