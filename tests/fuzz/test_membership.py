"""The engines of a fleet: leases with anything in them, and members that come and go in any order."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sluice.engine.client.base import EngineClient, Replica
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.joining import MemberFleetClient
from sluice.engine.fleet.membership import redis_leases
from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.engine.fleet.membership.members import Member, PushedMembership, check_members
from sluice.engine.fleet.membership.redis_leases import Lease, RedisMembership
from sluice.engine.statistics import NO_STATS
from sluice.errors import ErrorCode, SluiceError
from sluice.state.changes import Leases
from sluice.state.interface import Key, Put, Record
from sluice.state.memory import StoreInMemory
from tests.fuzz.damage import damaged
from tests.fuzz.running import example_settings, repeated


class StoredLeases(StoreInMemory):
    """A store of one fleet's leases, which may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_looks = 0

    async def scan(self, shelf: str) -> dict[str, Record]:
        self.num_looks += 1
        if self.is_away:
            raise SluiceError(ErrorCode.UNAVAILABLE, "away")
        return await super().scan(shelf)


SHELF = "{f}"
NAMES = ("a", "b", "c")
ADDRESSES = tuple(f"tcp://h:{port}" for port in range(1, 4))
lease_fields = {
    "name": st.sampled_from((*NAMES, "", "\n", 5, None)),
    "address": st.sampled_from((*ADDRESSES, "h:1", "tcp://h:99999", "", None)),
    "weight": st.sampled_from((1, 2.5, -1, "x", 1e308, None)),
    "version": st.sampled_from(("", "new", 5)),
    "is_leaving": st.sampled_from((False, True, "no")),
}
damaged_leases = st.builds(lambda fields: msgspec.json.encode(fields), st.fixed_dictionaries(lease_fields)).flatmap(
    damaged
)


@contextmanager
def looking_at_once() -> Iterator[None]:
    """Let gateways look again without a pause."""
    before, redis_leases.LOOK_S = redis_leases.LOOK_S, 0.0
    try:
        yield
    finally:
        redis_leases.LOOK_S = before


class LeasesOfAFleet(RuleBasedStateMachine):
    """Leases that come, change, end and break, in a Redis that may be away, as a gateway sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.store = StoredLeases()
        self.serving: set[str] = set()
        self.seen: tuple[Member, ...] = ()
        self.loop = asyncio.new_event_loop()
        membership = RedisMembership(FleetUrl.parse("redis://127.0.0.1:1/0#f"))
        cast(Any, membership)._leases = Leases(self.store, SHELF, 60)
        self.watching = self.loop.create_task(self._watch(membership))

    async def _watch(self, membership: RedisMembership) -> None:
        async for members in membership.watch(lambda member: member.name in self.serving):
            self.seen = members

    def _look(self) -> None:
        """Let the gateway look twice, so that it has seen all that is there."""

        async def until_seen() -> None:
            last = self.store.num_looks + 3
            while self.store.num_looks < last:
                assert not self.watching.done(), self.watching.exception()
                await asyncio.sleep(0)

        self.loop.run_until_complete(until_seen())

    @rule(name=st.sampled_from(NAMES), address=st.sampled_from(ADDRESSES), leaves=st.booleans())
    def renew(self, name: str, address: str, leaves: bool) -> None:
        self.write_anything(name, msgspec.json.encode(Lease(name, address, is_leaving=leaves)))

    @rule(name=st.sampled_from(NAMES), content=damaged_leases)
    def write_anything(self, name: str, content: bytes) -> None:
        self.loop.run_until_complete(self.store.put(Put(Key(SHELF, name), content)))

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        self.loop.run_until_complete(self.store.delete(Key(SHELF, name)))

    @rule()
    def lose_all(self) -> None:
        for name in NAMES:
            self.end(name)

    @rule(is_away=st.booleans())
    def go(self, is_away: bool) -> None:
        self.store.is_away = is_away

    @rule(name=st.sampled_from(NAMES), serves=st.booleans())
    def serve(self, name: str, serves: bool) -> None:
        (self.serving.add if serves else self.serving.discard)(name)

    @invariant()
    def members_are_those_with_leases_or_that_serve(self) -> None:
        before = self.seen
        self._look()
        check_members(self.seen)
        if self.store.is_away:
            assert self.seen == before
            return
        stored = self.loop.run_until_complete(StoreInMemory.scan(self.store, SHELF))
        leases = {name: lease for name, each in stored.items() if (lease := _read(each.body)) is not None}
        named = {lease.name for lease in leases.values()}
        kept = {each.name for each in before if each.name in self.serving}
        assert {each.name for each in self.seen} <= named | kept | {each.name for each in before}
        for name in NAMES:
            lease = leases.get(name)
            if lease is not None and lease.is_leaving and len(leases) == 1:
                assert lease.name not in {each.name for each in self.seen}

    def teardown(self) -> None:
        self.watching.cancel()
        self.loop.run_until_complete(asyncio.wait((self.watching,)))
        self.loop.close()


def _read(text: bytes) -> Lease | None:
    try:
        return msgspec.json.decode(text, type=Lease)
    except (ValueError, RecursionError):
        return None


@repeated
def test_leases_name_the_members() -> None:
    with looking_at_once():
        run_state_machine_as_test(LeasesOfAFleet, settings=example_settings(8))


class StartingEngine:
    """An engine's client that starts, or fails to, when the test says so."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.stats = NO_STATS
        self.info = SimpleNamespace(is_prefill=False)
        self.open_streams: tuple[object, ...] = ()
        self.is_serving = False
        self.num_stops = 0
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await self.outcome
        self.is_serving = True

    async def stop(self) -> None:
        self.num_stops += 1
        await asyncio.sleep(0)


class JoiningFleet(MemberFleetClient):
    """Takes replicas and lets them leave, and no more than that."""

    async def join(self, replica: Replica) -> None:
        await asyncio.sleep(0)
        assert replica.name not in [each.name for each in self.replicas if not each.is_draining]
        self.replicas.append(replica)

    async def remove(self, replica: Replica) -> None:
        await replica.engine.stop()
        self.replicas.remove(replica)


class Joining(RuleBasedStateMachine):
    """Members that are named and not any more, while their engines start, fail and serve."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engines: list[StartingEngine] = []
        self.named: tuple[Member, ...] = ()
        self.pushed = PushedMembership(())
        self.fleet = JoiningFleet(EngineConfig(model_path=""), self.pushed, self._make, drain_s=0.0)
        self.starting = self.loop.create_task(self.fleet.start())
        self.turn(2)

    def _make(self, member: Member) -> EngineClient:
        self.engines.append(StartingEngine(member))
        return cast(EngineClient, self.engines[-1])

    @rule(ports=st.sets(st.integers(1, 4), max_size=3))
    def name(self, ports: set[int]) -> None:
        self.named = tuple(Member(name=f"e{port}", address=f"tcp://h:{port}") for port in sorted(ports))
        self.pushed.push(self.named)

    @rule(number=st.integers(0, 9), fails=st.sampled_from((None, None, SluiceError, ValueError)))
    def answer(self, number: int, fails: type[Exception] | None) -> None:
        waiting = [each for each in self.engines if not each.outcome.done()]
        if not waiting:
            return
        future = waiting[number % len(waiting)].outcome
        if fails is None:
            future.set_result(None)
        else:
            future.set_exception(SluiceError(ErrorCode.INVALID, "no") if fails is SluiceError else fails("no"))

    @rule(turns=st.integers(0, 5))
    def turn(self, turns: int) -> None:
        async def some() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())

    def teardown(self) -> None:
        self.turn(30)
        joined = {each.name for each in self.fleet.replicas}
        latest = {each.member.name: each for each in self.engines}
        expected = {
            each.name for each in self.named if (latest[each.name].is_serving and not latest[each.name].num_stops)
        }
        assert joined == expected
        self.starting.cancel()
        self.loop.run_until_complete(self.fleet.stop())
        self.turn(30)
        for engine in self.engines:
            assert engine.num_stops == 1, engine.member
        self.loop.close()


@repeated
def test_members_join_and_leave_in_any_order() -> None:
    run_state_machine_as_test(Joining, settings=example_settings(12))
