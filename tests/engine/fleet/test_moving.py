"""The loss of a replica: its streams go on in the others, in real processes with a runner that fails on demand."""

import asyncio
import signal
from pathlib import Path

import pytest

from engine.fleet import moving
from engine.fleet.client import FleetClient
from engine.fleet.prefix_index import PrefixIndex
from sluice.errors import ErrorCode
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import fleet, kill, kill_first
from tests.waiting import until


def num_adopted(client: FleetClient) -> int:
    return sum(each.num_adopted for each in client.replicas)


async def test_requests_are_spread_over_the_replicas(tmp_path: Path) -> None:
    prompts = harmless(12, 40)
    async with fleet(tmp_path, 3) as client:
        streams = [client.submit(request(prompt, 40)) for prompt in prompts]
        assert [each.num_routed for each in client.replicas] == [4, 4, 4]
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 40) for prompt in prompts]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_a_lost_replica_go_on_in_the_other(tmp_path: Path, number: signal.Signals) -> None:
    prompts = harmless(32, 200)
    async with fleet(tmp_path, heartbeat_timeout_s=2.0) as client:
        streams = [client.submit(request(prompt, 200)) for prompt in prompts]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        kill_first(client, number)
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 200) for prompt in prompts]
        assert num_adopted(client) == client.num_resumed == 16
        assert (client.num_poisoned, client.failure) == (0, None)


async def test_the_next_engine_loads_when_the_streams_have_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "MOST_RESUMING_S", 60.0)
    prompts = harmless(4, 400)
    async with fleet(tmp_path, heartbeat_timeout_s=60.0) as client:
        streams = [client.submit(request(prompt, 400)) for prompt in prompts]
        await until(lambda: all(stream.output_token_ids for stream in streams))
        lost, other = client.replicas
        kill(other, signal.SIGSTOP)
        was = lost.engine.pids
        kill(lost)
        await until(lambda: num_adopted(client) == 2)
        await asyncio.sleep(0.3)
        assert lost.engine.pids == was
        kill(other, signal.SIGCONT)
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 400) for prompt in prompts]
        await until(lambda: lost.engine.is_serving)
        assert lost.engine.pids != was


async def test_what_waits_for_its_first_token_moves_too(tmp_path: Path) -> None:
    prompts = harmless(8, 20)
    async with fleet(tmp_path) as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]
        kill_first(client)  # most have no token yet, so they are probed
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        assert client.num_poisoned == 0


async def test_a_lost_replica_comes_back_and_takes_requests(tmp_path: Path) -> None:
    prompts = harmless(8, 20)
    async with fleet(tmp_path) as client:
        kill_first(client)
        await until(lambda: not client.replicas[0].engine.is_serving)
        assert not client.is_restarting
        assert await collect(client.submit(request(prompts[0], 20))) == echo(prompts[0], 20)
        await until(lambda: client.replicas[0].engine.is_serving)
        before = client.replicas[0].num_routed
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]
        await asyncio.gather(*map(collect, streams))
        assert client.replicas[0].num_routed == before + 4
        assert client.num_restarts == 1


async def test_where_no_replica_is_left_streams_go_to_the_first_that_is_back(tmp_path: Path) -> None:
    prompts = harmless(8, 200)
    async with fleet(tmp_path) as client:
        streams = [client.submit(request(prompt, 200)) for prompt in prompts]
        await until(lambda: all(stream.output_token_ids for stream in streams))
        for each in client.replicas:
            kill(each)
        await until(lambda: client.is_restarting)
        later = client.submit(request([9], 20))
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 200) for prompt in prompts]
        assert await collect(later) == echo([9], 20)
        assert client.num_restarts >= 1


@pytest.mark.parametrize("poison", [CRASH, HANG])
async def test_a_poisonous_request_takes_two_replicas_and_never_a_third(tmp_path: Path, poison: int) -> None:
    prompts = harmless(9, 400)
    async with fleet(tmp_path, 3, heartbeat_timeout_s=2.0) as client:
        streams = [client.submit(request(prompt, 400)) for prompt in prompts]
        await until(lambda: all(stream.output_token_ids for stream in streams))
        culprit = client.submit(request([poison]))
        error = await failure_of(culprit)
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 400) for prompt in prompts]
        await until(lambda: all(each.engine.is_serving for each in client.replicas))
        assert (client.num_restarts, client.num_poisoned) == (2, 1)


async def test_a_poisonous_one_among_those_that_came_together_is_found(tmp_path: Path) -> None:
    prompts = harmless(10, 20)
    async with fleet(tmp_path, 3) as client:
        streams = [client.submit(request(prompt, 20)) for prompt in prompts[:5]]
        culprit = client.submit(request([3, CRASH]))
        streams += [client.submit(request(prompt, 20)) for prompt in prompts[5:]]
        assert "crashed the engine twice" in (await failure_of(culprit)).message
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        await until(lambda: all(each.engine.is_serving for each in client.replicas))
        assert (client.num_restarts, client.num_poisoned) == (2, 1)


async def test_what_was_cancelled_meanwhile_does_not_move(tmp_path: Path) -> None:
    first, second = harmless(2, 60)
    async with fleet(tmp_path) as client:
        streams = [client.submit(request(prompt, 4000)) for prompt in (first, second)]
        await until(lambda: all(stream.output_token_ids for stream in streams))
        kill_first(client)
        [gone] = client.replicas[0].engine.open_streams
        gone.cancel()
        await until(lambda: not client.replicas[0].engine.is_serving)
        assert num_adopted(client) == 0
        await until(lambda: client.replicas[1].engine.stats.num_running == 1)


async def test_deadlines_count_from_the_first_submit(tmp_path: Path) -> None:
    [prompt] = harmless(1, 60)
    async with fleet(tmp_path) as client:
        stream = client.submit(request(prompt, 16_000, timeout_s=3.0))
        await until(lambda: bool(stream.output_token_ids))
        home = next(each for each in client.replicas if each.engine.open_streams)
        kill(home)
        assert (await failure_of(stream)).code is ErrorCode.DEADLINE
        assert num_adopted(client) == 1


async def test_counters_never_decrease(tmp_path: Path) -> None:
    prompts = harmless(4, 60)
    async with fleet(tmp_path) as client:
        await asyncio.gather(*(collect(client.submit(request(prompt, 60))) for prompt in prompts))
        await until(lambda: client.stats.generation_tokens_total == 240)
        kill_first(client)
        await until(lambda: client.num_restarts == 1)
        assert client.stats.generation_tokens_total == 240
        await asyncio.gather(*(collect(client.submit(request(prompt, 60))) for prompt in prompts))
        await until(lambda: client.stats.generation_tokens_total == 480)
        assert client.stats.num_blocks_free == client.info.capacity_blocks == 2 * client.info.num_blocks


async def test_the_router_hears_what_the_replicas_have_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "expect", lambda *_: None)  # what was sent does not count here, only reports do
    [prompt] = harmless(1, 20)
    long = request([*prompt, *([7] * 100)], 4)
    async with fleet(tmp_path) as client:
        await collect(client.submit(long))
        await until(lambda: max(client.leading_blocks(long), default=0) == 3)
        [home] = (each for each in client.replicas if each.num_routed)
        kill(home)
        await until(lambda: max(client.leading_blocks(long), default=0) == 0)
        await until(lambda: home.engine.is_serving)
        for _ in range(4):  # both have it in the end, the second one since its restart
            await asyncio.gather(*(collect(each.engine.submit(long)) for each in client.replicas))
        await until(lambda: [*client.leading_blocks(long)] == [3, 3])
