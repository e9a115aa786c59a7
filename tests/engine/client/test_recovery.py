"""The loss of an engine and its effect on clients: real processes, with a runner that fails on demand."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.client import adapters
from engine.client import process as process_client
from engine.client.process import ProcessEngineClient
from engine.client.stream import GenerationStream
from engine.config import EngineConfig, SchedulerPolicy
from engine.types import FinishReason, GenerateRequest
from sluice import backoff
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.fake_runner import echo
from tests.engine.parts import make_request
from tests.waiting import PATIENCE_S, until

MODULE = "tests.engine.client.faulty_engine"


@asynccontextmanager
async def faulty(
    folder: Path, heartbeat_timeout_s: float = 5.0, **limits: object
) -> AsyncIterator[ProcessEngineClient]:
    config = msgspec.structs.replace(EngineConfig(model_path=str(folder)), **limits)
    client = ProcessEngineClient(config, heartbeat_timeout_s=heartbeat_timeout_s, module=MODULE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


def request(prompt: list[int], max_tokens: int = 60, **fields: object) -> GenerateRequest:
    return make_request(prompt, f"r{prompt[0]}", max_tokens=max_tokens, **fields)


def harmless(num_prompts: int, max_tokens: int) -> list[list[int]]:
    """Return prompts whose answers have no token on which the runner fails."""
    prompts = ([start, 2, 3] for start in range(10, 4000))
    good = (prompt for prompt in prompts if not {CRASH, HANG} & {*echo(prompt, max_tokens)})
    return [next(good) for _ in range(num_prompts)]


async def collect(stream: GenerationStream) -> list[int]:
    tokens: list[int] = []
    async for event in stream:
        tokens += event.token_ids
        assert event.finish_reason in (None, FinishReason.LENGTH)
    return tokens


async def failure_of(stream: GenerationStream) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await collect(stream)
    return caught.value


def kill(client: ProcessEngineClient, number: signal.Signals = signal.SIGKILL) -> None:
    assert client.pid is not None
    os.kill(client.pid, number)


async def submit_running(client: ProcessEngineClient, asked: GenerateRequest) -> GenerationStream:
    """Submit a request and wait for its first token, which is not fetched."""
    stream = client.submit(asked)
    await until(lambda: bool(stream.output_token_ids))
    return stream


# -- a crash


async def test_32_streams_go_on_after_a_kill_and_bring_what_they_would_have_brought(tmp_path: Path) -> None:
    prompts = harmless(32, 60)
    async with faulty(tmp_path) as client:
        streams = [client.submit(request(prompt)) for prompt in prompts]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        kill(client)
        tokens = await asyncio.gather(*map(collect, streams))
        assert tokens == [echo(prompt, 60) for prompt in prompts]
        assert (client.num_restarts, client.num_resumed, client.num_poisoned) == (1, 32, 0)
        assert 0 < client.last_recovery_s == client.recovery_seconds_total
        assert not client.is_restarting
        assert client.failure is None


async def test_requests_of_an_adapter_wait_until_the_next_engine_has_it(tmp_path: Path) -> None:
    prompt, other = harmless(2, 60)
    async with faulty(tmp_path, enable_lora=True) as client:
        await client.load_adapter("a", "/adapters/a")
        stream = await submit_running(client, request(prompt, adapter="a"))
        kill(client)
        await until(lambda: client.is_restarting)
        later = client.submit(request(other, adapter="a"))
        assert await collect(stream) == echo(prompt, 60)
        assert await collect(later) == echo(other, 60)
        assert client.num_restarts == 1
        await client.unload_adapter("a")


async def test_a_folder_of_many_files_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[threading.Thread] = []

    def look(_: Path, **__: bool) -> str:
        places.append(threading.current_thread())
        return ""

    monkeypatch.setattr(adapters, "files_mark", look)
    async with faulty(tmp_path, enable_lora=True) as client:
        await client.load_adapter("a", "/adapters/a")
    assert len(places) == 1 and threading.current_thread() not in places


@pytest.mark.parametrize("seed", [None, 77])
async def test_a_sampled_answer_goes_on_with_the_same_random_numbers(tmp_path: Path, seed: int | None) -> None:
    banned = {CRASH: -100.0, HANG: -100.0}
    asked = request([5, 6], temperature=1.0, seed=seed, logit_bias=banned, max_tokens=80)
    async with faulty(tmp_path) as client:
        stream = await submit_running(client, asked)
        kill(client)
        tokens = await collect(stream)
        assert client.num_resumed == 1
        undisturbed = msgspec.structs.replace(stream.request, resume_token_ids=[])
        assert undisturbed.sampling.seed is not None
        assert await collect(client.submit(undisturbed)) == tokens


async def test_counters_never_go_backwards(tmp_path: Path) -> None:
    [prompt] = harmless(1, 60)
    async with faulty(tmp_path) as client:
        await collect(client.submit(request(prompt)))
        before = client.stats
        kill(client)
        await until(lambda: client.is_restarting)
        await until(lambda: client.stats.num_blocks_free == 0)
        assert client.stats.generation_tokens_total == before.generation_tokens_total
        await collect(client.submit(request(prompt)))
        assert client.stats.generation_tokens_total == 2 * before.generation_tokens_total
        assert client.stats.steps_total > before.steps_total


async def test_new_requests_wait_for_the_next_engine_up_to_the_bound(tmp_path: Path) -> None:
    prompts = harmless(3, 5)
    async with faulty(tmp_path, max_num_seqs=2, max_queued_requests=1) as client:
        kill(client)
        await until(lambda: client.is_restarting)
        streams = [client.submit(request(prompt, 5)) for prompt in prompts]
        with pytest.raises(SluiceError, match="3 requests wait") as caught:
            client.submit(request([9], 5))
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after_s is not None
        with pytest.raises(SluiceError, match="context"):
            client.submit(request([1] * client.info.max_model_len))
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 5) for prompt in prompts]


async def test_what_was_accepted_is_not_refused_by_a_full_queue_of_the_next_engine(tmp_path: Path) -> None:
    policy = SchedulerPolicy.MAX_UTILIZATION
    async with faulty(tmp_path, scheduler_policy=policy, max_queued_tokens=3) as client:
        # Together they may come to need more blocks than there are, so the queue counts their tokens.
        streams = [await submit_running(client, request([start, 2], 16_000)) for start in range(20, 25)]
        kill(client)
        await until(lambda: client.num_resumed == 5)
        before = [len(stream.output_token_ids) for stream in streams]
        while any(len(s.output_token_ids) == num for s, num in zip(streams, before, strict=True)):
            await asyncio.gather(*map(anext, streams))


async def test_streams_may_be_cancelled_while_there_is_no_engine(tmp_path: Path) -> None:
    first, second, third = harmless(3, 60)
    async with faulty(tmp_path) as client:
        gone, kept = await submit_running(client, request(first, 4000)), await submit_running(client, request(second))
        kill(client)
        await until(lambda: client.is_restarting)
        gone.cancel()
        new = client.submit(request(third))
        new.cancel()
        assert await collect(kept) == echo(second, 60)
        assert client.num_resumed == 1
        assert client.stats.num_running == 0


async def test_stopping_during_recovery_ends_the_streams_and_leaves_no_process(tmp_path: Path) -> None:
    [prompt] = harmless(1, 4)
    async with faulty(tmp_path) as client:
        stream = await submit_running(client, request(prompt, 4000))
        old = client.pid
        kill(client)
        await until(lambda: client.is_restarting and client.pid not in (None, old))
        pid = client.pid
        assert pid is not None
        await client.stop()
        assert "the engine was stopped" in (await failure_of(stream)).message
        assert not psutil.pid_exists(pid)


# -- a hang


async def test_a_stopped_engine_is_found_by_its_silence_and_replaced(tmp_path: Path) -> None:
    [prompt] = harmless(1, 400)
    async with faulty(tmp_path, heartbeat_timeout_s=1.0) as client:
        stream = await submit_running(client, request(prompt, 400))
        pid = client.pid
        kill(client, signal.SIGSTOP)
        assert await collect(stream) == echo(prompt, 400)
        assert (client.num_restarts, client.num_resumed) == (1, 1)
        assert pid is not None and not psutil.pid_exists(pid)


async def test_time_in_which_the_gateway_itself_did_not_run_is_no_silence() -> None:
    client = ProcessEngineClient(EngineConfig(model_path=""), heartbeat_timeout_s=0.5)
    watcher = asyncio.create_task(client._until_silent())
    await asyncio.sleep(0)
    block(0.8)
    await asyncio.sleep(0.25)
    assert not watcher.done()
    await asyncio.wait_for(watcher, PATIENCE_S)
    await client.stop()


def block(seconds: float) -> None:
    time.sleep(seconds)


async def test_deadlines_hold_while_the_engine_hangs(tmp_path: Path) -> None:
    first, second = harmless(2, 60)
    loop = asyncio.get_running_loop()
    async with faulty(tmp_path, heartbeat_timeout_s=20.0) as client:
        running = await submit_running(client, request(first, 4000, timeout_s=1.0))
        kill(client, signal.SIGSTOP)
        waiting = client.submit(request(second, queue_timeout_s=0.5))
        started = loop.time()
        for stream in (waiting, running):
            error = await failure_of(stream)
            assert error.code is ErrorCode.DEADLINE
        assert loop.time() - started < 20.0, "before the engine counts as dead"
        kill(client, signal.SIGCONT)
        await until(lambda: client.heartbeat_age_s() < 0.2 and client.stats.num_running == 0)
        assert client.num_restarts == 0


async def test_deadlines_hold_while_the_engine_restarts(tmp_path: Path) -> None:
    first, second = harmless(2, 60)
    async with faulty(tmp_path) as client:
        (tmp_path / "refuse").touch()
        running = await submit_running(client, request(first, 4000, timeout_s=0.5))
        kill(client)
        await until(lambda: client.is_restarting)
        waiting = client.submit(request(second, queue_timeout_s=0.1))
        assert (await failure_of(waiting)).code is ErrorCode.DEADLINE
        assert (await failure_of(running)).code is ErrorCode.DEADLINE
        assert client.is_restarting


# -- a request to blame


@pytest.mark.parametrize("poison", [CRASH, HANG])
async def test_a_poisonous_request_fails_after_two_crashes_and_the_others_survive(tmp_path: Path, poison: int) -> None:
    prompts = harmless(8, 400)
    async with faulty(tmp_path, heartbeat_timeout_s=1.0) as client:
        streams = [await submit_running(client, request(prompt, 400)) for prompt in prompts]
        culprit = client.submit(request([poison]))
        error = await failure_of(culprit)
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 400) for prompt in prompts]
        assert (client.num_restarts, client.num_poisoned) == (2, 1)


async def test_a_poisonous_one_of_many_that_came_together_is_found(tmp_path: Path) -> None:
    prompts = harmless(6, 20)
    async with faulty(tmp_path) as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts[:3]]
        culprit = client.submit(request([3, CRASH]))
        streams += [client.submit(request(prompt, 20)) for prompt in prompts[3:]]
        assert "crashed the engine twice" in (await failure_of(culprit)).message
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        assert client.num_poisoned == 1
        assert client.failure is None


# -- giving up


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.0)


@pytest.mark.usefixtures("no_delay")
async def test_an_engine_that_cannot_be_loaded_any_more_is_given_up(tmp_path: Path) -> None:
    async with faulty(tmp_path) as client:
        stream = await submit_running(client, request([9], 4000))
        (tmp_path / "refuse").touch()
        kill(client)
        error = await failure_of(stream)
        assert error.code is ErrorCode.UNAVAILABLE
        assert "the model is nowhere to be found" in error.message
        assert client.failure == error.message
        assert not client.is_restarting
        with pytest.raises(SluiceError, match="failed too often"):
            client.submit(request([9]))


@pytest.mark.usefixtures("no_delay")
async def test_one_that_any_request_kills_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "MAX_FUTILE_STARTS", 2)
    async with faulty(tmp_path) as client:
        (tmp_path / "die").touch()
        first = await failure_of(client.submit(request([1])))
        second = await failure_of(client.submit(request([2])))
        assert (first.code, second.code) == (ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE)
        assert client.failure is not None


@pytest.mark.usefixtures("no_delay")
async def test_a_load_that_fails_for_a_while_is_tried_again(tmp_path: Path) -> None:
    [prompt] = harmless(1, 60)
    async with faulty(tmp_path) as client:
        stream = await submit_running(client, request(prompt))
        (tmp_path / "refuse").touch()
        old = client.pid
        kill(client)
        await until(lambda: client.pid not in (None, old))
        refused = client.pid
        await until(lambda: client.pid not in (None, refused))
        (tmp_path / "refuse").unlink()
        assert await collect(stream) == echo(prompt, 60)


async def test_a_load_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "MIN_LOAD_TIMEOUT_S", 0.0)
    monkeypatch.setattr(process_client, "LOAD_TIMEOUT_FACTOR", 0.0)
    monkeypatch.setattr(backoff, "MAX_FUTILE_STARTS", 1)
    async with faulty(tmp_path) as client:
        stream = await submit_running(client, request([9], 4000))
        kill(client)
        assert (await failure_of(stream)).code is ErrorCode.UNAVAILABLE
        assert client.failure is not None
