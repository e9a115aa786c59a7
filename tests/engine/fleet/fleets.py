"""Fleets of virtual engines, whose runner echoes and fails on demand: of this process, or joined over the network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from sluice.engine.client.base import Replica
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineRole, Listening
from sluice.engine.fleet.choosing import hash_chain
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.joining import MemberFleetClient
from sluice.engine.fleet.membership.members import Member, Membership
from sluice.engine.fleet.router import MIN_SPLIT_TOKENS
from sluice.engine.fleet.waking import WakeSettings
from sluice.engine.types import GenerateRequest
from tests.engine.client.network import Network
from tests.engine.client.test_recovery import request
from tests.engine.client.virtual import Plan, VirtualAttached, VirtualClient, VirtualEngine, virtual_config
from tests.waiting import until

ANY_PORT = "tcp://127.0.0.1:0"


@asynccontextmanager
async def fleet(
    num_replicas: int = 2, num_prefill: int = 0, min_split_tokens: int = MIN_SPLIT_TOKENS, **limits: object
) -> AsyncIterator[FleetClient]:
    """A fleet that has started its engines, the first of which compute prompts."""
    network, config = Network(), virtual_config(**limits)
    prefill = msgspec.structs.replace(config, role=EngineRole.PREFILL)
    configs = [*[prefill] * num_prefill, *[config] * (num_replicas - num_prefill)]
    engines = [VirtualClient(Plan(network=network), each) for each in configs]
    replicas = [Replica(str(number), engine) for number, engine in enumerate(engines)]
    clock = asyncio.get_running_loop().time
    client = FleetClient(config, replicas, min_split_tokens=min_split_tokens, clock=clock)
    try:
        await client.start()
        yield client
    finally:
        await client.stop()
    for each in engines:
        each.check()


def leading_blocks(fleet: FleetClient, request: GenerateRequest) -> list[int]:
    """Return how many leading blocks of the prompt each replica is thought to have, by its number."""
    prompt, info = request.prompt_token_ids, fleet.info
    return fleet._chooser.index.leading_blocks(hash_chain(request, info).hashes(prompt, len(prompt) // info.block_size))


class Elsewhere:
    """Engines elsewhere on a network, and fleets that members are named to."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.network = Network()

    async def engine(self, endpoint: str = ANY_PORT, **limits: object) -> VirtualClient:
        """Start an engine that takes clients, by its launcher."""
        config = virtual_config(listening=Listening(endpoints=[endpoint]), **limits)
        launcher = VirtualClient(Plan(network=self.network), config)
        self._stack.callback(launcher.check)
        self._stack.push_async_callback(launcher.stop)
        await launcher.start()
        return launcher

    async def attached(self, place: str, **options: object) -> VirtualAttached:
        """Start a client of the engine at a place."""
        client = VirtualAttached(self.network, virtual_config(), place, **options)
        self._stack.push_async_callback(client.stop)
        await client.start()
        return client

    async def fleet(
        self, membership: Membership, wake: WakeSettings | None = None, drain_s: float = 30.0, model_path: str = ""
    ) -> MemberFleetClient:
        """Start a fleet of the engines that a membership names."""
        config = virtual_config(model_path=model_path)

        def make_client(member: Member) -> VirtualAttached:
            return VirtualAttached(self.network, config, member.address)

        clock = asyncio.get_running_loop().time
        client = MemberFleetClient(config, membership, make_client, drain_s=drain_s, wake=wake, clock=clock)
        self._stack.push_async_callback(client.stop)
        await client.start()
        return client


@asynccontextmanager
async def elsewhere() -> AsyncIterator[Elsewhere]:
    async with AsyncExitStack() as stack:
        yield Elsewhere(stack)


def member(launcher: VirtualClient, name: str = "a") -> Member:
    return Member(name=name, address=launcher.endpoints[0])


def engine_of(replica: Replica) -> VirtualEngine:
    """Return the newest engine of a replica of this process."""
    assert isinstance(replica.engine, VirtualClient)
    return replica.engine.engine


async def begun(client: FleetClient, *prompts: list[int], max_tokens: int, **fields: object) -> list[GenerationStream]:
    """Return streams that have brought tokens."""
    streams = [client.submit(request(prompt, max_tokens, **fields)) for prompt in prompts]
    await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
    return streams
