"""Streams of engines that leave or end in order while no other serves: they are held, and go on in the next one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from engine.client.process import ProcessEngineClient
from engine.client.stream import GenerationStream
from engine.config import EngineConfig, Listening
from engine.fleet.client import FleetClient
from engine.fleet.membership.members import Member
from engine.fleet.membership.pushed import PushedMembership
from engine.fleet.remote import make_fleet
from engine.fleet.waking import WakeSettings
from sluice.errors import ErrorCode
from tests.engine.client.test_over_tcp import ANY_PORT, listening
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.fake_runner import echo
from tests.waiting import PATIENCE_S, until

NUM_TOKENS, MAX_TOKENS = 600, 8000
PATIENT = WakeSettings(timeout_s=PATIENCE_S, max_requests=2)


def engine(folder: Path, endpoint: str = ANY_PORT) -> AbstractAsyncContextManager[ProcessEngineClient]:
    return listening(folder, Listening(endpoints=[endpoint]))


def member(launcher: ProcessEngineClient, name: str = "a") -> Member:
    return Member(name=name, address=launcher.endpoints[0])


@asynccontextmanager
async def fleet(
    folder: Path, membership: PushedMembership, wake: WakeSettings | None = PATIENT, drain_s: float = 0.0
) -> AsyncIterator[FleetClient]:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    client = make_fleet(EngineConfig(model_path=str(folder)), membership, drain_s=drain_s, wake=wake)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


async def begun(client: FleetClient, *prompts: list[int], **fields: object) -> list[GenerationStream]:
    """Return streams that have brought tokens."""
    streams = [client.submit(request(prompt, MAX_TOKENS, **fields)) for prompt in prompts]
    await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
    return streams


async def go_on(*streams: GenerationStream) -> None:
    """Wait until streams that were held have brought more tokens, and check that none is missing or twice."""
    before = {each: len(each.output_token_ids) for each in streams}
    await until(lambda: all(len(each.output_token_ids) > num_tokens + 3 for each, num_tokens in before.items()))
    for each in streams:
        each.cancel()
        assert each.output_token_ids == echo(each.request.prompt_token_ids, len(each.output_token_ids))


async def test_streams_of_the_last_engine_wait_for_the_next(tmp_path: Path) -> None:
    """The engine is named no more, its time to drain is over, and another joins: as many streams wait as there were,
    beside requests."""
    prompts = harmless(3, NUM_TOKENS)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(engine(tmp_path))
        membership = PushedMembership((member(old),))
        client = await stack.enter_async_context(fleet(tmp_path, membership))
        streams = await begun(client, *prompts)
        membership.push(())
        await until(lambda: not client.replicas)
        await until(lambda: client.num_held == client.stats.num_waiting == 3)  # more than requests may be
        assert client.is_asleep
        await until(lambda: old.stats.num_running == 0)
        new = await stack.enter_async_context(engine(tmp_path))
        membership.push((member(new, "b"),))
        await go_on(*streams)
        assert (client.num_held, client.replicas[0].num_adopted) == (0, 3)


async def test_an_engine_that_ends_gives_its_streams_back(tmp_path: Path) -> None:
    """Its own time to drain is over first. They go on in the other engine, or wait where that ends too, and requests
    that came meanwhile go on with them in the one that is started at the same address."""
    prompts = harmless(4, NUM_TOKENS)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(engine(tmp_path))
        second = await stack.enter_async_context(engine(tmp_path))
        membership = PushedMembership(
            (
                member(first),
                member(second, "b"),
            )
        )
        client = await stack.enter_async_context(fleet(tmp_path, membership, drain_s=PATIENCE_S))
        await until(lambda: len(client.replicas) == 2)
        streams = await begun(client, *prompts)
        by_name = {each.name: each for each in client.replicas}
        first.drain()
        await first.stop()
        await until(lambda: by_name["b"].num_adopted == by_name["a"].num_routed == 2)
        second.drain()
        await second.stop()
        await until(lambda: client.num_held == 4)
        assert (client.num_poisoned, client.is_asleep) == (0, False), "both are named still, and may come back"
        later = client.submit(request(prompts[0], 20))
        await stack.enter_async_context(engine(tmp_path, second.endpoints[0]))
        await go_on(*streams)
        assert await collect(later) == echo(prompts[0], 20)


async def test_requests_that_wait_while_an_engine_drains_go_on_when_it_is_back(tmp_path: Path) -> None:
    [prompt] = harmless(1, 20)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(engine(tmp_path))
        client = await stack.enter_async_context(fleet(tmp_path, PushedMembership((member(old),))))
        old.drain()
        await until(lambda: client.is_asleep)
        held = asyncio.create_task(client.wait_awake())
        await until(lambda: client.num_held == 1)
        await old.stop()
        await stack.enter_async_context(engine(tmp_path, old.endpoints[0]))
        await held
        assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)


async def test_what_is_held_ends_in_time_and_by_its_client(tmp_path: Path) -> None:
    first, second, third = harmless(3, NUM_TOKENS)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(engine(tmp_path))
        membership = PushedMembership((member(old),))
        client = await stack.enter_async_context(fleet(tmp_path, membership, WakeSettings(3.0, 2)))
        [patient, gone] = await begun(client, first, second)
        [hasty] = await begun(client, third, timeout_s=1.0)
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
async def test_without_waking_streams_wait_only_for_engines_that_are_named(tmp_path: Path, ends: str) -> None:
    [prompt] = harmless(1, NUM_TOKENS)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(engine(tmp_path))
        membership = PushedMembership((member(old),))
        client = await stack.enter_async_context(fleet(tmp_path, membership, None))
        [stream] = await begun(client, prompt)
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
