"""Prompts that a prefill replica computes for another one, in real engine processes."""

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from engine.client.stream import GenerationStream
from engine.fleet.client import FleetClient
from engine.fleet.handover import HandoverOutcome
from engine.fleet.splitting import SplitReason
from sluice.errors import ErrorCode
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.client.test_recovery import collect, failure_of, request
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import fleet, kill, kill_first
from tests.waiting import until


def long_prompts(num_prompts: int, max_tokens: int, num_tokens: int = 3000) -> list[list[int]]:
    """Return long prompts whose answers have no token on which the runner fails."""
    prompts = ([start] * num_tokens for start in range(10, 4000))
    good = (prompt for prompt in prompts if not {CRASH, HANG} & {*echo(prompt, max_tokens)})
    return [next(good) for _ in range(num_prompts)]


def outcome(client: FleetClient, name: HandoverOutcome) -> int:
    return client.handover.outcomes[name]


async def read(stream: GenerationStream) -> tuple[list[int], int | None]:
    """Return a stream's tokens, and how many tokens of its prompt were cached."""
    tokens, num_cached = [], None
    async for event in stream:
        tokens += event.token_ids
        if event.detail is not None and event.detail.num_cached_tokens is not None:
            num_cached = event.detail.num_cached_tokens
    return tokens, num_cached


def check_all_free(client: FleetClient) -> None:
    stats = client.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_blocks_free == client.info.capacity_blocks


def sent_blocks(client: FleetClient) -> int:
    stats = client.stats.handover
    return 0 if stats is None else stats.sent_blocks_total


async def test_a_long_prompt_is_computed_by_the_prefill_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *prompts, other, another = long_prompts(6, 20)
    async with fleet(tmp_path, 2, num_prefill=1) as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]
        answers = await asyncio.gather(*map(read, streams))
        assert answers == [(echo(prompt, 20), 2976) for prompt in prompts]
        assert await collect(client.submit(request([7, 8, 9], 20))) == echo([7, 8, 9], 20)
        assert client.handover.decisions == {SplitReason.SPLIT: 4, SplitReason.SHORT: 1}
        assert client.handover.outcomes == {HandoverOutcome.HANDED_OVER: 4}
        prefill, decode = client.replicas
        assert (prefill.num_routed, prefill.num_prefilled, decode.num_routed) == (0, 4, 5)
        # The prefill replica says in its next report what it has sent, which may come after the answers.
        await until(lambda: sent_blocks(client) == 4 * 93)
        stats = client.stats.handover
        assert stats is not None
        assert (stats.sent_blocks_total, stats.received_blocks_total) == (4 * 93, 4 * 93)
        assert stats.sent_bytes_total == stats.received_bytes_total == 4 * 93 * 32 * 8
        # The same again is there already.
        assert await read(client.submit(request(prompts[0], 20))) == (echo(prompts[0], 20), 2976)
        assert client.handover.decisions[SplitReason.SHORT] == 2
        # An engine that computes other blocks hands over none.
        prefill.engine._info = msgspec.structs.replace(prefill.engine.info, block_identity="another")
        for prompt in (other, another):
            assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)
        assert client.handover.decisions[SplitReason.NOBODY] == 2
        assert caplog.text.count("hands no prompts to replica 1, whose KV blocks are not the same") == 1
        await until(lambda: client.stats.num_blocks_used == 0)
        check_all_free(client)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_replica_that_is_lost_fails_no_request(tmp_path: Path, number: signal.Signals) -> None:
    prompts = long_prompts(2, 20, 8000)
    async with fleet(tmp_path, 2, num_prefill=1, heartbeat_timeout_s=2.0) as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]
        assert client.handover.decisions == {SplitReason.SPLIT: 2}
        await until(lambda: client.replicas[0].engine.stats.prompt_tokens_total > 0)
        kill_first(client, number)
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        assert client.handover.outcomes.total() == 2
        assert outcome(client, HandoverOutcome.HANDED_OVER) < 2
        assert (client.num_poisoned, client.replicas[1].engine.num_restarts) == (0, 0)
        await until(lambda: client.replicas[0].engine.is_serving)
        later = client.submit(request(prompts[0][:3000], 20))
        assert (await read(later))[0] == echo(prompts[0][:3000], 20)


async def test_a_poisonous_prompt_takes_the_prefill_replica_and_one_other(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3, num_prefill=1) as client:
        error = await failure_of(client.submit(request([5] * 2000 + [CRASH] + [5] * 2000)))
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        await until(lambda: client.num_restarts == 2 and all(each.engine.is_serving for each in client.replicas))
        assert client.num_poisoned == 1
        assert outcome(client, HandoverOutcome.LOST) == 1


async def test_a_cancel_frees_both_and_the_last_replica_generates(tmp_path: Path) -> None:
    [prompt] = long_prompts(1, 20, 16_000)
    [shorter] = long_prompts(1, 20, 2000)
    async with fleet(tmp_path, 2, num_prefill=1) as client:
        stream = client.submit(request(prompt, 20))
        assert client.replicas[0].engine.open_streams
        stream.cancel()
        await until(lambda: outcome(client, HandoverOutcome.GONE) == 1)
        await until(lambda: client.replicas[0].engine.stats.num_running == 0)
        assert client.replicas[1].engine.stats.prompt_tokens_total == 0
        await until(lambda: client.stats.num_blocks_free == client.info.capacity_blocks)
        check_all_free(client)
        kill(client.replicas[1])
        await until(lambda: not client.replicas[1].engine.is_serving)
        assert await collect(client.submit(request(shorter, 20))) == echo(shorter, 20)
        assert client.replicas[0].num_routed == 1


async def test_a_request_that_was_held_moves_when_its_replica_is_lost(tmp_path: Path) -> None:
    [prompt] = long_prompts(1, 20, 16_000)
    async with fleet(tmp_path, 3, num_prefill=1) as client:
        stream = client.submit(request(prompt, 20))
        [number] = [n for n in (1, 2) if client.replicas[n].engine.open_streams]
        kill(client.replicas[number])
        assert await collect(stream) == echo(prompt, 20)
        assert outcome(client, HandoverOutcome.GONE) == 1


async def test_a_prefill_replica_that_hangs_leaves_time_to_compute_the_prompt(tmp_path: Path) -> None:
    [prompt] = long_prompts(1, 2, 1000)
    async with fleet(tmp_path, 2, num_prefill=1) as client:
        kill_first(client, signal.SIGSTOP)
        assert await collect(client.submit(request(prompt, 2, timeout_s=6.0))) == echo(prompt, 2)
        assert outcome(client, HandoverOutcome.LATE) == 1
        kill_first(client, signal.SIGCONT)
