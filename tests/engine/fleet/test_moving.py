"""The loss of a replica, in virtual time: its streams go on in the others."""

import asyncio

import pytest

from sluice.engine.fleet import moving
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.errors import ErrorCode
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.client.virtual import Break, Fault, in_virtual_time
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import begun, engine_of, fleet, leading_blocks
from tests.waiting import until


def num_adopted(client: FleetClient) -> int:
    return sum(each.num_adopted for each in client.replicas)


@pytest.mark.parametrize("how", Break, ids=lambda how: how.value)
@in_virtual_time
async def test_streams_go_on_wherever_the_wire_to_a_replica_breaks(how: Break) -> None:
    """At each of its messages in turn, the last ones of which are statistics."""
    prompts = harmless(4, 6)
    for before_frame in range(12):
        async with fleet() as client:
            engine_of(client.replicas[0]).fault = Fault(how, before_frame)
            streams = [client.submit(request(prompt, 6)) for prompt in prompts]
            answers = await asyncio.gather(*map(collect, streams))
            assert answers == [echo(prompt, 6) for prompt in prompts], f"before message {before_frame}"
            assert (client.recoveries.num_poisoned, client.failure) == (0, None)
            assert all(each.num_routed == 2 for each in client.replicas)


@in_virtual_time
async def test_what_a_lost_replica_had_begun_is_resumed_and_its_numbers_are_told() -> None:
    prompts = harmless(8, 60)
    async with fleet() as client:
        streams = await begun(client, *prompts, max_tokens=60)
        assert [each.num_routed for each in client.replicas] == [4, 4]
        engine_of(client.replicas[0]).end()
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        assert num_adopted(client) == client.recoveries.num_resumed == 4
        await until(lambda: client.recoveries.num_restarts == 1)
        assert client.stats.generation_tokens_total == 8 * 60
        await asyncio.gather(*(collect(client.submit(request(prompt, 60))) for prompt in prompts))
        assert client.stats.generation_tokens_total == 2 * 8 * 60, "counters never decrease"
        assert client.replicas[0].num_routed > 4, "it takes requests again"
        assert client.stats.num_blocks_free == client.info.capacity_blocks == 2 * client.info.num_blocks


@in_virtual_time
async def test_the_next_engine_loads_when_the_streams_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MOST_RESUMING_S", 5.0)
    prompts = harmless(4, 100)
    async with fleet() as client:
        streams = await begun(client, *prompts, max_tokens=100)
        lost, other = client.replicas
        engine_of(other).stop()
        was = engine_of(lost)
        was.end()
        await until(lambda: num_adopted(client) == 2)
        await asyncio.sleep(4.0)
        assert engine_of(lost) is was
        engine_of(other).go_on()
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 100) for prompt in prompts]
        await until(lambda: lost.engine.is_serving)
        assert engine_of(lost) is not was


@in_virtual_time
async def test_where_no_replica_is_left_streams_go_to_the_first_that_is_back() -> None:
    prompts = harmless(8, 60)
    async with fleet() as client:
        streams = await begun(client, *prompts, max_tokens=60)
        for each in client.replicas:
            engine_of(each).end()
        await until(lambda: client.is_restarting)
        later = client.submit(request([9], 20))
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        assert await collect(later) == echo([9], 20)
        assert client.recoveries.num_restarts >= 1


@pytest.mark.parametrize(
    ("poison", "are_new"),
    [
        pytest.param([CRASH], False, id="it crashes engines that have served others"),
        pytest.param([HANG], False, id="it hangs them"),
        pytest.param([3, CRASH], True, id="it came together with others"),
    ],
)
@in_virtual_time
async def test_a_poisonous_request_takes_two_replicas_and_never_a_third(poison: list[int], are_new: bool) -> None:
    prompts = harmless(9, 60)
    async with fleet(3) as client:
        streams = [client.submit(request(prompt)) for prompt in prompts[:5]]
        await until(lambda: are_new or all(stream.output_token_ids for stream in streams))
        culprit = client.submit(request(poison))
        streams += [client.submit(request(prompt)) for prompt in prompts[5:]]
        error = await failure_of(culprit)
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        await until(lambda: all(each.engine.is_serving for each in client.replicas))
        assert (client.recoveries.num_restarts, client.recoveries.num_poisoned) == (2, 1)


@in_virtual_time
async def test_those_that_may_have_crashed_a_replica_all_go_to_one_other() -> None:
    prompts = harmless(9, 20)
    async with fleet(3) as client:
        engine_of(client.replicas[0]).fault = Fault(Break.ENDED)
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        assert sorted(each.num_adopted for each in client.replicas[1:]) == [0, 3]


@in_virtual_time
async def test_what_was_cancelled_meanwhile_does_not_move() -> None:
    async with fleet() as client:
        await begun(client, *harmless(2, 60), max_tokens=4000)
        [gone] = client.replicas[0].engine.open_streams
        engine_of(client.replicas[0]).end()
        gone.cancel()
        await until(lambda: not client.replicas[0].engine.is_serving)
        assert num_adopted(client) == 0
        await until(lambda: client.replicas[1].engine.stats.num_running == 1)


@in_virtual_time
async def test_deadlines_count_from_the_first_submit() -> None:
    [prompt] = harmless(1, 60)
    async with fleet() as client:
        began = asyncio.get_running_loop().time()
        [stream] = await begun(client, prompt, max_tokens=16_000, timeout_s=3.0)
        engine_of(next(each for each in client.replicas if each.engine.open_streams)).end()
        assert (await failure_of(stream)).code is ErrorCode.DEADLINE
        assert num_adopted(client) == 1
        assert asyncio.get_running_loop().time() - began == pytest.approx(3.0, abs=0.3)


@in_virtual_time
async def test_the_router_hears_what_the_replicas_have_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "expect", lambda *_: None)  # what was sent does not count here, only reports do
    [prompt] = harmless(1, 20)
    long = request([*prompt, *([7] * 100)], 4)
    async with fleet() as client:
        await collect(client.submit(long))
        await until(lambda: max(leading_blocks(client, long), default=0) == 3)
        [home] = (each for each in client.replicas if each.num_routed)
        engine_of(home).end()
        await until(lambda: max(leading_blocks(client, long), default=0) == 0)
        await until(lambda: home.engine.is_serving)
        for each in client.replicas:  # the second one since its restart
            await collect(each.engine.submit(long))
        await until(lambda: [*leading_blocks(client, long)] == [3, 3])
