"""Both clients against real engines: the thread with a runner without a model, the process with a tiny checkpoint."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from sluice.engine.client.base import EngineClient
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.priority import NICENESS
from tests import paths
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.in_process_client import InProcessEngineClient
from tests.engine.parts import make_request
from tests.errors import error_of
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHECKPOINT = paths.DATA / "checkpoints" / "llama_tiny"


@asynccontextmanager
async def started(client: EngineClient) -> AsyncIterator[EngineClient]:
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


def in_process(**limits: int) -> InProcessEngineClient:
    runner = EchoRunner(num_blocks=512, block_size=32, max_model_len=16_384)
    return InProcessEngineClient(msgspec.convert({"model_path": "", **limits}, EngineConfig), runner)


def in_own_process() -> ProcessEngineClient:
    return ProcessEngineClient(EngineConfig(model_path=str(CHECKPOINT), dtype="f32", num_blocks=64))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ProcessEngineClient]:
    """A process that all tests share which leave it as it was."""
    async with started(client := in_own_process()):
        yield client


@pytest_asyncio.fixture(loop_scope="module", params=["thread", "process"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    """Either client."""
    if request.param == "process":
        yield request.getfixturevalue("running")
        return
    async with started(in_process()) as client:
        yield client


async def collect(stream: GenerationStream) -> tuple[list[int], FinishReason | None]:
    tokens, reason = [], None
    async for event in stream:
        tokens += event.token_ids
        reason = event.finish_reason
    return tokens, reason


async def until_idle(client: EngineClient) -> None:
    """Wait for heartbeats until the engine has no sequence and no used block."""
    await until(lambda: not (client.stats.num_running or client.stats.num_waiting or client.stats.num_blocks_used))


async def test_the_engine_gives_way_to_the_gateway(running: ProcessEngineClient) -> None:
    """The gateway needs little of the processor but at once, and an engine's threads keep every core busy."""
    assert running.pid is not None
    threads = [thread.id for thread in psutil.Process(running.pid).threads()]
    niceness = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert niceness == {min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)}


async def test_tokens_arrive_as_the_runner_gave_them() -> None:
    async with started(in_process()) as client:
        tokens, reason = await collect(client.submit(make_request([1, 2, 3], max_tokens=6)))
    assert (tokens, reason) == (echo([1, 2, 3], 6), FinishReason.LENGTH)


async def test_many_at_once_get_what_each_gets_alone(client: EngineClient) -> None:
    prompts = [[1 + i, 2, 3 + i] for i in range(12)]
    requests = [make_request(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    alone = [await collect(client.submit(request)) for request in requests]
    streams = [client.submit(request) for request in requests]
    assert list(await asyncio.gather(*map(collect, streams))) == alone
    assert all(len(tokens) == 8 for tokens, _ in alone)


async def test_cancel_frees_the_blocks(client: EngineClient) -> None:
    before = client.stats.generation_tokens_total
    stream = client.submit(make_request([1, 2], max_tokens=500, ignore_eos=True))
    await anext(stream)
    stream.cancel()
    stream.cancel()
    await until_idle(client)
    assert client.stats.generation_tokens_total - before < 500


async def test_what_can_never_be_served_is_refused_at_submit(client: EngineClient) -> None:
    too_long = make_request([1] * client.info.max_model_len, max_tokens=1)
    refused = error_of(client.submit, too_long)
    assert (refused.code, "context" in refused.message) == (ErrorCode.INVALID, True)


async def test_a_full_queue_is_told_by_the_stream() -> None:
    async with started(in_process(max_num_seqs=1, max_queued_requests=0)) as client:
        first = client.submit(make_request([1], max_tokens=4000))
        await anext(first)
        with pytest.raises(SluiceError) as caught:
            await anext(client.submit(make_request([1], max_tokens=5)))
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after_s is not None


async def test_abort_all_ends_every_stream_with_the_error() -> None:
    async with started(in_process()) as client:
        streams = [client.submit(make_request([i], max_tokens=4000)) for i in range(3)]
        await asyncio.gather(*map(anext, streams))
        client.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "closing"))
        for stream in streams:
            with pytest.raises(SluiceError, match="closing"):
                await collect(stream)
        await until_idle(client)


async def test_nothing_can_be_asked_before_the_start() -> None:
    with pytest.raises(SluiceError, match="still loading"):
        _ = in_process().info


async def test_a_silent_engine_shows_in_the_heartbeat(running: ProcessEngineClient) -> None:
    assert running.pid is not None
    os.kill(running.pid, signal.SIGSTOP)
    try:
        await until(lambda: running.heartbeat_age_s() >= 1.5)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    await until(lambda: running.heartbeat_age_s() <= 1.0)


async def test_a_model_that_cannot_load_says_why(tmp_path: Path) -> None:
    client = ProcessEngineClient(EngineConfig(model_path=str(tmp_path / "absent")))
    with pytest.raises(SluiceError, match="absent"):
        await client.start()


async def test_stop_leaves_no_process_and_no_socket_file() -> None:
    client = in_own_process()
    async with started(client):
        pid = client.pid
        assert pid is not None
        assert psutil.pid_exists(pid)
        folder = client._engine.folder
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
