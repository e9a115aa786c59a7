"""Prompts that a prefill replica computes for another one, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from sluice.engine.client.stream import GenerationStream
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.handover import HandoverOutcome, SplitReason
from sluice.errors import ErrorCode
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.client.test_recovery import collect, failure_of, request
from tests.engine.client.virtual import Break, Fault, in_virtual_time
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import engine_of, fleet
from tests.waiting import until

NUM_TOKENS = 1000
NUM_BLOCKS = (NUM_TOKENS - 1) // 32
"""Blocks of a prompt that the prefill replica computes."""


def long_prompts(num_prompts: int, max_tokens: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return long prompts whose answers have no token on which the runner fails."""
    prompts = ([start] * num_tokens for start in range(10, 4000))
    good = (prompt for prompt in prompts if not {CRASH, HANG} & {*echo(prompt, max_tokens)})
    return [next(good) for _ in range(num_prompts)]


@asynccontextmanager
async def splitting(num_replicas: int = 2) -> AsyncIterator[FleetClient]:
    """A fleet whose first replica computes prompts."""
    async with fleet(num_replicas, 1, min_split_tokens=512, max_num_batched_tokens=256) as client:
        yield client


async def read(stream: GenerationStream) -> tuple[list[int], int | None]:
    """Return a stream's tokens, and how many tokens of its prompt were cached."""
    tokens, num_cached = [], None
    async for event in stream:
        tokens += event.token_ids
        if event.detail is not None and event.detail.num_cached_tokens is not None:
            num_cached = event.detail.num_cached_tokens
    return tokens, num_cached


def moved(client: FleetClient) -> tuple[int, ...]:
    """Return how many blocks were sent and received, and how many bytes."""
    stats = client.stats.handover
    assert stats is not None
    sent, received = stats.sent_blocks_total, stats.received_blocks_total
    return sent, received, stats.sent_bytes_total, stats.received_bytes_total


def is_all_free(client: FleetClient) -> bool:
    stats = client.stats
    return (stats.num_running, stats.num_waiting, stats.num_blocks_free) == (0, 0, client.info.capacity_blocks)


@in_virtual_time
async def test_a_long_prompt_is_computed_by_the_prefill_replica(caplog: pytest.LogCaptureFixture) -> None:
    *prompts, other, another = long_prompts(6, 20)
    async with splitting() as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]
        answers = await asyncio.gather(*map(read, streams))
        assert answers == [(echo(prompt, 20), 32 * NUM_BLOCKS) for prompt in prompts]
        assert await collect(client.submit(request([7, 8, 9], 20))) == echo([7, 8, 9], 20)
        assert client.handover.decisions == {SplitReason.SPLIT: 4, SplitReason.SHORT: 1}
        assert client.handover.outcomes == {HandoverOutcome.HANDED_OVER: 4}
        prefill, decode = client.replicas
        assert (prefill.num_routed, prefill.num_prefilled, decode.num_routed) == (0, 4, 5)
        # The prefill replica says in its next report what it has sent, which may come after the answers.
        await until(lambda: moved(client)[0] == 4 * NUM_BLOCKS)
        assert moved(client) == (4 * NUM_BLOCKS, 4 * NUM_BLOCKS, 4 * NUM_BLOCKS * 32 * 8, 4 * NUM_BLOCKS * 32 * 8)
        # The same again is there already.
        assert await read(client.submit(request(prompts[0], 20))) == (echo(prompts[0], 20), 32 * NUM_BLOCKS)
        assert client.handover.decisions[SplitReason.SHORT] == 2
        # An engine that computes other blocks hands over none.
        prefill.engine._info = msgspec.structs.replace(prefill.engine.info, block_identity="another")
        for prompt in (other, another):
            assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)
        assert client.handover.decisions[SplitReason.NOBODY] == 2
        assert caplog.text.count("hands no prompts to replica 1, whose KV blocks are not the same") == 1
        await until(lambda: is_all_free(client))


@pytest.mark.parametrize("how", Break, ids=lambda how: how.value)
@in_virtual_time
async def test_a_prefill_replica_that_is_lost_at_any_message_fails_no_request(how: Break) -> None:
    prompts = long_prompts(2, 8)
    outcomes = set[HandoverOutcome]()
    for before_frame in range(0, 20, 2):
        async with splitting() as client:
            engine_of(client.replicas[0]).fault = Fault(how, before_frame)
            streams = [client.submit(request(prompt, 8)) for prompt in prompts]
            assert client.handover.decisions == {SplitReason.SPLIT: 2}
            assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 8) for prompt in prompts]
            await until(lambda client=client: client.replicas[0].engine.recoveries.num_restarts == 1)
            assert client.handover.outcomes.total() == 2
            assert (client.recoveries.num_poisoned, client.replicas[1].engine.recoveries.num_restarts) == (0, 0)
            outcomes |= client.handover.outcomes.keys()
    assert outcomes & {HandoverOutcome.LOST, HandoverOutcome.LATE}


@in_virtual_time
async def test_a_poisonous_prompt_takes_the_prefill_replica_and_one_other() -> None:
    async with splitting(3) as client:
        error = await failure_of(client.submit(request([5] * 600 + [CRASH] + [5] * 400)))
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        await until(
            lambda: client.recoveries.num_restarts == 2 and all(each.engine.is_serving for each in client.replicas)
        )
        assert client.recoveries.num_poisoned == 1
        assert client.handover.outcomes[HandoverOutcome.LOST] == 1


@in_virtual_time
async def test_a_cancel_frees_both_and_the_last_replica_generates() -> None:
    prompt, other = long_prompts(2, 20)
    async with splitting() as client:
        stream = client.submit(request(prompt, 20))
        assert client.replicas[0].engine.open_streams
        stream.cancel()
        await until(lambda: client.handover.outcomes[HandoverOutcome.GONE] == 1)
        await until(lambda: is_all_free(client))
        assert client.replicas[1].engine.stats.prompt_tokens_total == 0
        engine_of(client.replicas[1]).end()
        await until(lambda: not client.replicas[1].engine.is_serving)
        assert await collect(client.submit(request(other, 20))) == echo(other, 20)
        assert client.replicas[0].num_routed == 1


@in_virtual_time
async def test_a_request_that_was_held_moves_when_its_replica_is_lost() -> None:
    [prompt] = long_prompts(1, 20)
    async with splitting(3) as client:
        stream = client.submit(request(prompt, 20))
        [home] = [each for each in client.replicas[1:] if each.engine.open_streams]
        engine_of(home).end()
        assert await collect(stream) == echo(prompt, 20)
        assert client.handover.outcomes[HandoverOutcome.GONE] == 1


@in_virtual_time
async def test_a_prefill_replica_that_hangs_leaves_time_to_compute_the_prompt() -> None:
    [prompt] = long_prompts(1, 2)
    async with splitting() as client:
        engine_of(client.replicas[0]).stop()
        assert await collect(client.submit(request(prompt, 2, timeout_s=6.0))) == echo(prompt, 2)
        assert client.handover.outcomes[HandoverOutcome.LATE] == 1
        engine_of(client.replicas[0]).go_on()
