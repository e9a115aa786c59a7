"""The loss of an engine and its effect on clients, in virtual time: its wire breaks where a test says so."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from sluice.backoff import CULPRIT_WEIGHT, MAX_FUTILE_STARTS
from sluice.engine.client import base
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import SchedulerPolicy
from sluice.engine.runners.base import Runner
from sluice.engine.types import FinishReason, GenerateRequest
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.client.virtual import (
    HEARTBEAT_TIMEOUT_S,
    LOAD_S,
    Break,
    FaultyRunner,
    Plan,
    VirtualClient,
    in_virtual_time,
    virtual,
    virtual_config,
)
from tests.engine.fake_runner import echo
from tests.engine.in_process_client import InProcessEngineClient
from tests.engine.parts import make_request
from tests.waiting import until


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


async def submit_running(client: VirtualClient, asked: GenerateRequest) -> GenerationStream:
    """Submit a request and wait for its first token, which is not fetched."""
    stream = client.submit(asked)
    await until(lambda: stream.output_token_ids)
    return stream


class Refusing:
    """Makes runners, or refuses to while `is_refused`."""

    def __init__(self) -> None:
        self.is_refused = False

    def __call__(self) -> Runner:
        if self.is_refused:
            raise SluiceError(ErrorCode.INTERNAL, "the model is nowhere to be found")
        return FaultyRunner()


# -- a crash


@in_virtual_time
async def test_many_streams_go_on_after_a_crash_and_bring_what_they_would_have_brought() -> None:
    prompts = harmless(32, 60)
    async with virtual(max_num_seqs=64, max_num_batched_tokens=128) as client:
        streams = [client.submit(request(prompt)) for prompt in prompts]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        client.break_wire()
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        found = client.recoveries
        assert (found.num_restarts, found.num_resumed, found.num_poisoned) == (1, 32, 0)
        assert client.recoveries.last_s == client.recoveries.seconds_total == pytest.approx(LOAD_S, abs=0.1)
        assert not client.is_restarting and client.failure is None


@in_virtual_time
async def test_an_answer_that_was_begun_elsewhere_goes_on_behind_all_its_tokens() -> None:
    [prompt] = harmless(1, 60)
    async with virtual() as client:
        stream = await submit_running(client, request(prompt, resume_token_ids=echo(prompt, 7)))
        client.break_wire()
        assert await collect(stream) == echo(prompt, 60)[7:]


@in_virtual_time
async def test_requests_of_an_adapter_wait_until_the_next_engine_has_it() -> None:
    prompt, other = harmless(2, 60)
    async with virtual(enable_lora=True) as client:
        await client.load_adapter("a", "/adapters/a")
        stream = await submit_running(client, request(prompt, adapter="a"))
        client.break_wire()
        await until(lambda: client.is_restarting)
        later = client.submit(request(other, adapter="a"))
        assert (await collect(stream), await collect(later)) == (echo(prompt, 60), echo(other, 60))
        assert client.recoveries.num_restarts == 1
        await client.unload_adapter("a")


async def test_an_adapters_folder_of_many_files_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """This loop is a real one, beside which threads run."""
    places: list[threading.Thread] = []

    def look(_: Path, **__: bool) -> str:
        places.append(threading.current_thread())
        return ""

    monkeypatch.setattr(base, "files_mark", look)
    client = InProcessEngineClient(virtual_config(enable_lora=True), FaultyRunner())
    await client.start()
    await client.load_adapter("a", "/adapters/a")
    await client.stop()
    assert len(places) == 1 and threading.current_thread() not in places


@pytest.mark.parametrize("seed", [None, 77])
@in_virtual_time
async def test_a_sampled_answer_goes_on_with_the_same_random_numbers(seed: int | None) -> None:
    asked = request([5, 6], temperature=1.0, seed=seed, max_tokens=80)
    async with virtual() as client:
        stream = await submit_running(client, asked)
        client.break_wire()
        tokens = await collect(stream)
        assert client.recoveries.num_resumed == 1
        undisturbed = msgspec.structs.replace(stream.request, resume_token_ids=[])
        assert undisturbed.sampling.seed is not None
        assert await collect(client.submit(undisturbed)) == tokens


@in_virtual_time
async def test_counters_never_go_backwards() -> None:
    [prompt] = harmless(1, 60)
    async with virtual() as client:
        await collect(client.submit(request(prompt)))
        before = client.stats
        client.break_wire()
        await until(lambda: client.is_restarting)
        await until(lambda: client.stats.num_blocks_free == 0)
        assert client.stats.generation_tokens_total == before.generation_tokens_total
        await collect(client.submit(request(prompt)))
        assert client.stats.generation_tokens_total == 2 * before.generation_tokens_total
        assert client.stats.steps_total > before.steps_total


@in_virtual_time
async def test_new_requests_wait_for_the_next_engine_up_to_the_bound() -> None:
    prompts = harmless(3, 5)
    async with virtual(max_num_seqs=2, max_queued_requests=1) as client:
        client.break_wire()
        await until(lambda: client.is_restarting)
        streams = [client.submit(request(prompt, 5)) for prompt in prompts]
        with pytest.raises(SluiceError, match="3 requests wait") as caught:
            client.submit(request([9], 5))
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after_s is not None
        with pytest.raises(SluiceError, match="context"):
            client.submit(request([1] * client.info.max_model_len))
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 5) for prompt in prompts]


@in_virtual_time
async def test_what_was_accepted_is_not_refused_by_a_full_queue_of_the_next_engine() -> None:
    async with virtual(scheduler_policy=SchedulerPolicy.MAX_UTILIZATION, max_queued_tokens=3) as client:
        # Together they may come to need more blocks than there are, so the queue counts their tokens.
        streams = [await submit_running(client, request([start, 2], 16_000)) for start in range(20, 25)]
        client.break_wire()
        await until(lambda: client.recoveries.num_resumed == 5)
        before = [len(stream.output_token_ids) for stream in streams]
        await until(lambda: all(len(s.output_token_ids) > num for s, num in zip(streams, before, strict=True)))


@in_virtual_time
async def test_streams_may_be_cancelled_while_there_is_no_engine() -> None:
    first, second, third = harmless(3, 60)
    async with virtual() as client:
        gone, kept = await submit_running(client, request(first, 900)), await submit_running(client, request(second))
        client.break_wire()
        await until(lambda: client.is_restarting)
        gone.cancel()
        client.submit(request(third)).cancel()
        assert await collect(kept) == echo(second, 60)
        assert (client.recoveries.num_resumed, client.stats.num_running) == (1, 0)


@in_virtual_time
async def test_stopping_during_recovery_ends_the_streams() -> None:
    [prompt] = harmless(1, 4)
    async with virtual() as client:
        stream = await submit_running(client, request(prompt, 900))
        client.break_wire()
        await until(lambda: len(client.plan.engines) == 2 and client.pid is not None)
        await client.stop()
        assert "the engine was stopped" in (await failure_of(stream)).message
        assert client.engine.exited.done()


# -- a hang


@in_virtual_time
async def test_time_in_which_the_gateway_itself_did_not_run_is_no_silence() -> None:
    async with virtual() as client:
        client.engine.router.is_deaf = True
        client.stand_still(HEARTBEAT_TIMEOUT_S + 1.0)
        await asyncio.sleep(HEARTBEAT_TIMEOUT_S - 2.0)
        assert client.recoveries.num_restarts == 0 and not client.is_restarting
        await until(lambda: client.recoveries.num_restarts == 1)


@in_virtual_time
async def test_deadlines_hold_while_the_engine_hangs() -> None:
    first, second = harmless(2, 60)
    async with virtual() as client:
        running = await submit_running(client, request(first, 900, timeout_s=1.0))
        client.break_wire(Break.SILENT)
        waiting = client.submit(request(second, queue_timeout_s=0.5))
        for stream in (waiting, running):
            assert (await failure_of(stream)).code is ErrorCode.DEADLINE
        assert client.heartbeat_age_s() < HEARTBEAT_TIMEOUT_S and client.recoveries.num_restarts == 0


@in_virtual_time
async def test_deadlines_hold_while_the_engine_restarts() -> None:
    first, second = harmless(2, 60)
    async with virtual(Plan(make_runner=(runners := Refusing()))) as client:
        runners.is_refused = True
        running = await submit_running(client, request(first, 900, timeout_s=0.5))
        client.break_wire()
        await until(lambda: client.is_restarting)
        waiting = client.submit(request(second, queue_timeout_s=0.1))
        assert (await failure_of(waiting)).code is ErrorCode.DEADLINE
        assert (await failure_of(running)).code is ErrorCode.DEADLINE
        assert client.is_restarting


@in_virtual_time
async def test_a_request_that_began_in_time_or_has_ended_meets_no_deadline() -> None:
    [prompt] = harmless(1, 300)
    async with virtual() as client:
        stream = client.submit(request(prompt, 300, timeout_s=60.0, queue_timeout_s=0.5))
        assert await collect(stream) == echo(prompt, 300)
        assert not client._timers


# -- a request to blame


@pytest.mark.parametrize("poison", [CRASH, HANG])
@in_virtual_time
async def test_a_poisonous_request_fails_after_two_crashes_and_the_others_survive(poison: int) -> None:
    prompts = harmless(7, 400)
    async with virtual() as client:
        streams = [await submit_running(client, request(prompt, 400)) for prompt in prompts]
        error = await failure_of(client.submit(request([poison])))
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 400) for prompt in prompts]
        assert (client.recoveries.num_restarts, client.recoveries.num_poisoned) == (2, 1)


@in_virtual_time
async def test_a_poisonous_one_of_many_that_came_together_is_found() -> None:
    prompts = harmless(6, 20)
    async with virtual() as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts[:3]]
        culprit = client.submit(request([3, CRASH]))
        streams += [client.submit(request(prompt, 20)) for prompt in prompts[3:]]
        assert "crashed the engine twice" in (await failure_of(culprit)).message
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        assert (client.recoveries.num_poisoned, client.failure) == (1, None)


# -- giving up


@in_virtual_time
async def test_an_engine_that_cannot_be_loaded_any_more_is_given_up() -> None:
    async with virtual(Plan(make_runner=(runners := Refusing()))) as client:
        stream = await submit_running(client, request([9], 900))
        runners.is_refused = True
        client.break_wire()
        error = await failure_of(stream)
        assert error.code is ErrorCode.UNAVAILABLE
        assert "the model is nowhere to be found" in error.message
        assert client.failure == error.message and not client.is_restarting
        assert len(client.plan.engines) == 1 + MAX_FUTILE_STARTS
        with pytest.raises(SluiceError, match="failed too often"):
            client.submit(request([9]))


@in_virtual_time
async def test_an_engine_that_any_request_ends_is_given_up() -> None:
    """Starts that a request spoils count a quarter, so that many may be to blame before it is the engine."""
    async with virtual() as client:
        for _ in range(1 + int(MAX_FUTILE_STARTS / CULPRIT_WEIGHT)):
            if client.failure is None:
                assert "crashed the engine twice" in (await failure_of(client.submit(request([CRASH])))).message
                await until(lambda: client.is_serving or client.failure)
        assert client.failure is not None and "failed too often" in client.failure


@in_virtual_time
async def test_a_load_that_fails_for_a_while_is_tried_again() -> None:
    [prompt] = harmless(1, 60)
    async with virtual(Plan(make_runner=(runners := Refusing()))) as client:
        stream = await submit_running(client, request(prompt))
        runners.is_refused = True
        client.break_wire()
        await until(lambda: len(client.plan.engines) == 3)
        runners.is_refused = False
        assert await collect(stream) == echo(prompt, 60)


@in_virtual_time
async def test_a_load_that_never_ends_is_given_up() -> None:
    async with virtual(Plan(load_s=[LOAD_S, 1e9])) as client:
        stream = await submit_running(client, request([9], 900))
        client.break_wire()
        assert (await failure_of(stream)).code is ErrorCode.UNAVAILABLE
        assert client.failure is not None and "it did not load within 60 s" in client.failure
