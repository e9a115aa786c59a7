"""Streams of engines that leave or end in order while no other serves: they are held, and go on in the next one."""

import asyncio
import json
from pathlib import Path

import pytest

from sluice.engine.client.stream import GenerationStream
from sluice.engine.fleet.membership.members import PushedMembership
from sluice.engine.fleet.waking import WakeSettings
from sluice.errors import ErrorCode
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.client.virtual import in_virtual_time
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import begun, elsewhere, member
from tests.waiting import PATIENCE_S, until

NUM_TOKENS, MAX_TOKENS = 600, 8000
PATIENT = WakeSettings(timeout_s=PATIENCE_S, max_requests=2)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The folder of a checkpoint, which says enough to hold requests for it."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    return str(tmp_path)


async def go_on(*streams: GenerationStream) -> None:
    """Wait until streams that were held have brought more tokens, and check that none is missing or twice."""
    before = {each: len(each.output_token_ids) for each in streams}
    await until(lambda: all(len(each.output_token_ids) > num_tokens + 3 for each, num_tokens in before.items()))
    for each in streams:
        each.cancel()
        assert each.output_token_ids == echo(each.request.prompt_token_ids, len(each.output_token_ids))


@in_virtual_time
async def test_streams_of_the_last_engine_wait_for_the_next(folder: str) -> None:
    """The engine is named no more, its time to drain is over, and another joins: as many streams wait as there were,
    beside requests."""
    async with elsewhere() as place:
        old = await place.engine()
        membership = PushedMembership((member(old),))
        client = await place.fleet(membership, PATIENT, 0.0, folder)
        streams = await begun(client, *harmless(3, NUM_TOKENS), max_tokens=MAX_TOKENS)
        membership.push(())
        await until(lambda: not client.replicas)
        await until(lambda: client.num_held == client.stats.num_waiting == 3)  # more than requests may be
        assert client.is_asleep
        await until(lambda: old.stats.num_running == 0)
        membership.push((member(await place.engine(), "b"),))
        await go_on(*streams)
        assert (client.num_held, client.replicas[0].num_adopted) == (0, 3)


@in_virtual_time
async def test_an_engine_that_ends_gives_its_streams_back(folder: str) -> None:
    """Its own time to drain is over first. They go on in the other engine, or wait where that ends too, and requests
    that came meanwhile go on with them in the one that is started at the same address."""
    prompts = harmless(4, NUM_TOKENS)
    async with elsewhere() as place:
        first, second = await place.engine(), await place.engine()
        membership = PushedMembership((member(first), member(second, "b")))
        client = await place.fleet(membership, PATIENT, PATIENCE_S, folder)
        await until(lambda: len(client.replicas) == 2)
        streams = await begun(client, *prompts, max_tokens=MAX_TOKENS)
        by_name = {each.name: each for each in client.replicas}
        first.drain()
        await first.stop()
        await until(lambda: by_name["b"].num_adopted == by_name["a"].num_routed == 2)
        second.drain()
        await second.stop()
        await until(lambda: client.num_held == 4)
        assert (client.recoveries.num_poisoned, client.is_asleep) == (0, False), (
            "both are named still, and may come back"
        )
        later = client.submit(request(prompts[0], 20))
        await place.engine(second.endpoints[0])
        await go_on(*streams)
        assert await collect(later) == echo(prompts[0], 20)


@in_virtual_time
async def test_requests_that_wait_while_an_engine_drains_go_on_when_it_is_back(folder: str) -> None:
    [prompt] = harmless(1, 20)
    async with elsewhere() as place:
        old = await place.engine()
        client = await place.fleet(PushedMembership((member(old),)), PATIENT, 0.0, folder)
        old.drain()
        await until(lambda: client.is_asleep)
        held = asyncio.create_task(client.wait_awake())
        await until(lambda: client.num_held == 1)
        await old.stop()
        await place.engine(old.endpoints[0])
        await held
        assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)


@in_virtual_time
async def test_what_is_held_ends_in_time_and_by_its_client(folder: str) -> None:
    first, second, third = harmless(3, NUM_TOKENS)
    async with elsewhere() as place:
        membership = PushedMembership((member(await place.engine()),))
        client = await place.fleet(membership, WakeSettings(3.0, 2), 0.0, folder)
        [patient, gone] = await begun(client, first, second, max_tokens=MAX_TOKENS)
        [hasty] = await begun(client, third, max_tokens=MAX_TOKENS, timeout_s=1.0)
        membership.push(())
        await until(lambda: client.num_held == 3)
        gone.cancel()
        await until(lambda: client.num_held == 2)
        assert (await failure_of(hasty)).code is ErrorCode.DEADLINE
        late = await failure_of(patient)
        assert (late.code, late.message) == (
            ErrorCode.UNAVAILABLE,
            "no engine of this model has started within 3 s (--wake-timeout-secs); try again in 27 s",
        )
        assert client.num_held == 0


@pytest.mark.parametrize("ends", ["leaves", "drains"])
@in_virtual_time
async def test_without_waking_streams_wait_only_for_engines_that_are_named(ends: str) -> None:
    [prompt] = harmless(1, NUM_TOKENS)
    async with elsewhere() as place:
        old = await place.engine()
        membership = PushedMembership((member(old),))
        client = await place.fleet(membership, drain_s=0.0)
        [stream] = await begun(client, prompt, max_tokens=MAX_TOKENS)
        if ends == "drains":
            old.drain()
            await old.stop()
            await until(lambda: client.num_held == 1)
        membership.push(())
        failure = await failure_of(stream)
        assert (failure.code, failure.message) == (
            ErrorCode.UNAVAILABLE,
            "no engine of this model can be reached",
        )
