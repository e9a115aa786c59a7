"""Engines that register themselves in a real Redis, and gateways that find them there."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Listening
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.joining import make_fleet
from sluice.engine.fleet.membership import redis_leases
from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.engine.fleet.membership.members import Member
from sluice.engine.fleet.membership.redis_leases import Lease, RedisMembership, Registration
from sluice.errors import SluiceError
from sluice.state.interface import Key, Put, RedisLayout
from sluice.state.redis_store import StoreInRedis
from tests.engine.client.test_over_tcp import ANY_PORT, listening
from tests.engine.client.test_recovery import collect, harmless, request
from tests.engine.fake_runner import echo
from tests.serving.caching.parts import RedisServer
from tests.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def lease_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_leases, "LEASE_S", 0.6)
    monkeypatch.setattr(redis_leases, "LOOK_S", 0.05)
    monkeypatch.setattr(redis_leases, "_TIMEOUT_S", 0.3)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    await server.start()
    yield server
    server.kill()


def url_of(redis: RedisServer) -> FleetUrl:
    return FleetUrl.parse(f"redis://127.0.0.1:{redis.port}/0#rill")


def lease(name: str, port: int, **fields: object) -> Lease:
    return Lease(name, f"tcp://10.0.0.1:{port}", **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def registered(url: FleetUrl, *leases: Lease) -> AsyncIterator[list[Registration]]:
    found = [Registration(url, each) for each in leases]
    for each in found:
        each.start()
    try:
        yield found
    finally:
        for each in found:
            await each.end()


class Watched:
    """The members as a gateway sees them."""

    def __init__(self, url: FleetUrl) -> None:
        self.members: tuple[Member, ...] = ()
        self.serving: set[str] = set()
        """Names of engines whose heartbeat this gateway hears."""
        self._watching = asyncio.create_task(self._watch(RedisMembership(url)))

    async def _watch(self, membership: RedisMembership) -> None:
        async for members in membership.watch(lambda member: member.name in self.serving):
            self.members = members

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.members]

    async def stop(self) -> None:
        self._watching.cancel()
        await asyncio.wait((self._watching,))


@asynccontextmanager
async def watched(url: FleetUrl) -> AsyncIterator[Watched]:
    found = Watched(url)
    try:
        yield found
    finally:
        await found.stop()


async def test_engines_come_and_say_that_they_leave(redis: RedisServer) -> None:
    url = url_of(redis)
    async with (
        registered(url, lease("a", 1), lease("b", 2, version="new", weight=2.0)) as [first, _],
        watched(url) as w,
    ):
        await until(lambda: w.names == ["a", "b"])
        assert w.members[1] == Member(name="b", address="tcp://10.0.0.1:2", version="new", weight=2.0)
        w.serving = {"a", "b"}
        await first.end()
        await until(lambda: w.names == ["b"])
        await asyncio.sleep(2 * redis_leases.LEASE_S)
        assert w.names == ["b"], "its lease was renewed"
    other = FleetUrl.parse(f"{url.redis}#another")
    async with registered(url, lease("a", 1)), watched(other) as w:
        await asyncio.sleep(0.3)
        assert not w.names, "one Redis has several fleets"


async def test_a_lease_that_ended_takes_away_only_an_engine_that_does_not_serve(redis: RedisServer) -> None:
    url = url_of(redis)
    store = StoreInRedis(url.redis, RedisLayout("sluice:members:", "Redis", is_listed=True))
    async with watched(url) as w:
        for name, port in (("lost", 1), ("cut-off", 2)):
            await store.put(Put(Key("{rill}", name), msgspec.json.encode(lease(name, port)), ttl_s=2))
        await until(lambda: w.names == ["cut-off", "lost"])
        w.serving = {"cut-off"}
        await until(lambda: w.names == ["cut-off"])
        await asyncio.sleep(2 * redis_leases.LEASE_S)
        assert w.names == ["cut-off"]
        w.serving = set()
        await until(lambda: w.names == [])
    await store.close()


async def test_redis_may_be_away_and_lose_what_it_had(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    url = url_of(redis)
    async with registered(url, lease("a", 1)), watched(url) as w:
        await until(lambda: w.names == ["a"])
        w.serving = {"a"}
        redis.signal(signal.SIGSTOP)
        await until(lambda: "names no engines now" in caplog.text and "does not take the lease" in caplog.text)
        await asyncio.sleep(2 * redis_leases.LEASE_S)
        assert w.names == ["a"]
        redis.signal(signal.SIGCONT)
        await until(lambda: "names engines again" in caplog.text and "registered at 127.0.0.1" in caplog.text)
        redis.kill()
        await redis.start()  # it has nothing on disk
        await asyncio.sleep(2 * redis_leases.LEASE_S)
        assert w.names == ["a"]
        async with watched(url) as newcomer:
            await until(lambda: newcomer.names == ["a"])
    assert caplog.text.count("names no engines now") <= 2


async def test_a_name_is_one_engine_s(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    url = url_of(redis)
    async with registered(url, lease("a", 1)) as [first], watched(url) as w:
        await until(lambda: w.names == ["a"])
        async with registered(url, lease("a", 2)):
            await until(lambda: "the name a is that of the engine at tcp://10.0.0.1:1" in caplog.text)
            assert [each.address for each in w.members] == ["tcp://10.0.0.1:1"]
            await first.end()
            await until(lambda: [each.address for each in w.members] == ["tcp://10.0.0.1:2"])


async def test_what_nobody_can_use_is_named_once(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    url = url_of(redis)
    store = StoreInRedis(url.redis, RedisLayout("sluice:members:", "Redis", is_listed=True))
    for name, body in (
        ("worst", b'{"name": "worst", "address": "\xff"}'),
        ("deep", b'{"x": ' + b"[" * 100_000),
        ("bad", b"{"),
        ("worse", b'{"name": "worse", "address": "here"}'),
    ):
        await store.put(Put(Key("{rill}", name), body))
    async with registered(url, lease("good", 1)), watched(url) as w:
        await until(lambda: w.names == ["good"])
        await asyncio.sleep(0.3)
    for name in ("bad", "worst", "deep"):
        assert caplog.text.count(f"the lease of '{name}'") == 1
    assert caplog.text.count("address of worse must be tcp://HOST:PORT, got 'here'") == 1
    await store.close()


@pytest.mark.parametrize(
    "text",
    [
        "redis://",
        "redis:///0#a",
        "http://h/0#a",
        "redis://h:0/0",
        "redis://h:x/0",
        "redis://h/0#a b",
        "redis://h/0#a/b",
    ],
)
def test_a_fleet_is_named_by_a_redis_and_a_name(text: str) -> None:
    with pytest.raises(SluiceError, match="redis://HOST:PORT/DB#FLEET") as refused:
        FleetUrl.parse(text)
    assert refused.value.param == "engines"


def test_a_password_is_not_shown() -> None:
    url = FleetUrl.parse("rediss://me:secret@cache.example:6380/2#rill")
    assert (url.place, url.redis) == ("cache.example:6380#rill", "rediss://me:secret@cache.example:6380/2")
    assert FleetUrl.parse("redis://[::1]/0").place == "[::1]:6379#default"
    with pytest.raises(SluiceError, match=r"127\.0\.0\.1:1#a cannot be used") as refused:
        RedisMembership(FleetUrl.parse("redis://:secret@127.0.0.1:1/0?db=x#a"))
    assert "secret" not in refused.value.message


@asynccontextmanager
async def fleet_of(url: FleetUrl) -> AsyncIterator[FleetClient]:
    client = make_fleet(EngineConfig(model_path="elsewhere"), RedisMembership(url), drain_s=0.5)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


@asynccontextmanager
async def registered_engine(
    folder: Path, url: FleetUrl, name: str
) -> AsyncIterator[tuple[ProcessEngineClient, Registration]]:
    async with AsyncExitStack() as stack:
        here = Listening(endpoints=[ANY_PORT])
        launcher = await stack.enter_async_context(listening(folder, here, max_num_seqs=32))
        [registration] = await stack.enter_async_context(registered(url, Lease(name, launcher.endpoints[0])))
        yield launcher, registration


@pytest.mark.long
async def test_a_rolling_upgrade_fails_no_request(tmp_path: Path, redis: RedisServer) -> None:
    """Each engine drains and ends while another takes its place: nothing fails, and all texts are what they were."""
    url, failed, done = url_of(redis), [], 0
    is_over = asyncio.Event()

    async def keep_asking(client: FleetClient, prompt: list[int]) -> None:
        nonlocal done
        while not is_over.is_set():
            for length in (400, 7, 40):
                if await collect(client.submit(request(prompt, length))) != echo(prompt, length):
                    failed.append(prompt)
                done += 1

    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(registered_engine(tmp_path, url, name)) for name in ("old-1", "old-2")
        }
        client = await stack.enter_async_context(fleet_of(url))
        await until(lambda: len(client.replicas) == 2)
        asking = [asyncio.create_task(keep_asking(client, prompt)) for prompt in harmless(8, 400)]
        for number in (1, 2):
            old, new = f"old-{number}", f"new-{number}"
            await stack.enter_async_context(registered_engine(tmp_path, url, new))
            await until(lambda name=new: name in [each.name for each in client.replicas])
            before, (launcher, registration) = done, engines[old]
            launcher.drain()
            await registration.end()
            await until(lambda name=old: name not in [each.name for each in client.replicas])
            assert launcher.pid is not None
            os.kill(launcher.pid, signal.SIGKILL)  # no stream is left there
            await until(lambda number=before: done > number + 24)
        assert [each.name for each in client.replicas] == ["new-1", "new-2"]
        is_over.set()
        await asyncio.gather(*asking)
    assert not failed
