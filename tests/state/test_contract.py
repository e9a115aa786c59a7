"""What a store promises to the servers that share it, in memory, SQLite and Redis."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.state.changes import Leases
from sluice.state.connections import FileLimits, Schema
from sluice.state.interface import ABSENT, Key, Put, RedisLayout, Store
from sluice.state.memory import StoreInMemory
from sluice.state.opening import open_store
from sluice.state.sqlite import RECORDS, Bounds, FileLayout, StoreInFile
from tests.clock import ManualClock
from tests.serving.caching.parts import RedisServer
from tests.waiting import until

_NUMBERS = count(1)
SECRET = "s3cret"
IN_FILE = FileLayout("the store {}", Schema(0x51, (RECORDS,)), FileLimits(num_readers=2, survives_power_cuts=False))
IN_REDIS = RedisLayout("sluice:test:", "the store", is_listed=True)


class Place(NamedTuple):
    """Where servers share a store, and how it goes away and comes back."""

    address: str
    leave: Callable[[], Awaitable[None]]
    come_back: Callable[[], Awaitable[None]]


FindPlace = Callable[[RedisServer, Path], Place]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--databases", "1000", "--requirepass", SECRET)
    asyncio.run(server.start())
    yield server
    server.kill()


def in_a_file(redis: RedisServer, folder: Path) -> Place:
    path, kept = folder / "state" / "place.sqlite", folder / "kept"

    async def leave() -> None:
        connection = apsw.Connection(str(path))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # else the log beside it stands for the file
        connection.close()
        path.rename(kept)
        path.write_bytes(b"of another program " * 1000)

    async def come_back() -> None:
        kept.rename(path)

    return Place(str(path), leave, come_back)


def in_redis(redis: RedisServer, folder: Path) -> Place:
    async def leave() -> None:
        redis.kill()

    return Place(f"redis://:{SECRET}@127.0.0.1:{redis.port}/{next(_NUMBERS)}", leave, redis.start)


@pytest.fixture(params=[None, in_a_file, in_redis], ids=["memory", "a file", "Redis"])
async def stores(
    request: pytest.FixtureRequest, redis: RedisServer, tmp_path: Path
) -> AsyncIterator[tuple[Store, Store]]:
    """A store as two servers have it open; in memory it is one server's."""
    find_place: FindPlace | None = request.param
    if find_place is None:
        memory = StoreInMemory()
        yield memory, memory
        return
    address = find_place(redis, tmp_path).address
    opened = open_store(address, IN_FILE, IN_REDIS), open_store(address, IN_FILE, IN_REDIS)
    yield opened
    for each in opened:
        await each.close()


async def change(store: Store, of: Callable[[int], int], *keys: Key) -> None:
    """Change the numbers of some records at once, again where others change one meanwhile."""
    is_done = False
    while not is_done:
        found = [await store.get(each) for each in keys]
        numbers = [of(0 if each is None else int(each.body)) for each in found]
        versions = [ABSENT if each is None else each.version for each in found]
        puts = zip(keys, numbers, versions, strict=True)
        is_done = await store.put(*(Put(key, b"%d" % number, version) for key, number, version in puts))


KEYS = st.builds(Key, st.sampled_from(("x", "x:y")), st.sampled_from("ab"))
PUTS = st.builds(Put, KEYS, st.none() | st.binary(max_size=2), st.none() | st.integers(0, 2), st.none())
CHANGES = st.lists(PUTS, min_size=1, max_size=3, unique_by=lambda each: each.key)
QUICKLY = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICKLY
@given(st.lists(st.tuples(CHANGES | KEYS, st.integers(0, 1)), max_size=10))
async def test_a_store_has_what_was_put(stores: tuple[Store, Store], steps: list[tuple[list[Put] | Key, int]]) -> None:
    """A plain dictionary, in which a step is made whole or not at all, tells what a store must have."""
    mark, records = str(next(_NUMBERS)), dict[Key, tuple[bytes, int]]()
    for step, at in steps:
        if isinstance(step, Key):
            key = Key(mark + step.shelf, step.name)
            assert await stores[at].delete(key) is (records.pop(key, None) is not None)
            continue
        puts = [each._replace(key=Key(mark + each.key.shelf, each.key.name)) for each in step]
        versions = {each.key: records[each.key][1] if each.key in records else ABSENT for each in puts}
        is_made = all(each.version in (None, versions[each.key]) for each in puts)
        assert await stores[at].put(*puts) is is_made
        for each in puts if is_made else ():
            if each.body is None:
                records.pop(each.key, None)
            else:
                records[each.key] = each.body, versions[each.key] + 1
    for reader in stores:
        for shelf in (mark + "x", mark + "x:y"):
            found = await reader.scan(shelf)
            assert found == {key.name: record for key, record in records.items() if key.shelf == shelf}
            for name in "ab":
                assert await reader.get(Key(shelf, name)) == found.get(name)


@QUICKLY
@given(st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.integers(0, 1)), max_size=12))
async def test_of_changes_at_the_same_time_none_is_lost_and_none_is_half_made(
    stores: tuple[Store, Store], changes: list[tuple[set[str], int]]
) -> None:
    mark = str(next(_NUMBERS))
    await asyncio.gather(
        *(change(stores[at], lambda n: n + 1, *(Key(mark, each) for each in names)) for names, at in changes)
    )
    expected = {each: sum(each in names for names, _ in changes) for each in "abc"}
    for reader in stores:
        found = {name: (int(record.body), record.version) for name, record in (await reader.scan(mark)).items()}
        assert found == {name: (number, number) for name, number in expected.items() if number}


@QUICKLY
@given(st.lists(st.lists(st.sampled_from(("take", "give up")), max_size=4), min_size=1, max_size=4))
async def test_a_lease_has_one_holder_at_a_time(stores: tuple[Store, Store], plans: list[list[str]]) -> None:
    shelf, free, holding = str(next(_NUMBERS)), b"free", set[int]()

    async def follow(number: int, plan: list[str]) -> None:
        leases, mine = Leases(stores[number % 2], shelf, 60), b"%d" % number
        for wish in plan:
            if wish == "take":
                others = await leases.take("it", mine, lambda found: found in (mine, free))
                assert others not in (mine, free)
                if others is None:
                    holding.add(number)
                    assert holding == {number}
            elif number in holding:
                holding.discard(number)
                await leases.take("it", free, lambda found: found == mine)

    await asyncio.gather(*(follow(number, plan) for number, plan in enumerate(plans)))
    found = await Leases(stores[0], shelf, 60).find()
    assert found.get("it", free) == (b"%d" % holding.pop() if holding else free)


async def test_a_holder_that_is_silent_loses_its_lease(stores: tuple[Store, Store]) -> None:
    shelf = str(next(_NUMBERS))
    assert await Leases(stores[0], shelf, 0.2).take("it", b"a", lambda _: False) is None

    async def is_free() -> bool:
        return await Leases(stores[1], shelf, 60).take("it", b"b", lambda _: False) is None

    await until(is_free)
    assert await Leases(stores[0], shelf, 0.2).take("it", b"a", lambda found: found == b"a") == b"b"


async def test_what_is_kept_for_a_time_is_gone_after_it(stores: tuple[Store, Store]) -> None:
    brief, lasting = Key("me", "brief"), Key("me", "lasting")
    assert await stores[0].put(Put(brief, b"1", ttl_s=0.2), Put(lasting, b"2", ttl_s=0.2))
    assert await stores[0].put(Put(lasting, b"3"))

    async def is_gone() -> bool:
        return await stores[1].get(brief) is None

    await until(is_gone)
    assert not await stores[1].delete(brief)
    assert [*await stores[1].scan("me")] == ["lasting"]
    assert await stores[1].put(Put(brief, b"3", ABSENT)), "its version is forgotten too"
    assert {*await stores[0].scan("me")} == {"brief", "lasting"}


async def test_a_new_file_may_be_opened_by_several_at_once(tmp_path: Path) -> None:
    """Servers that start together do so. SQLite refuses some of them at once: of 30 files, about two."""
    for number in range(30):
        opened = [StoreInFile(tmp_path / f"{number}", IN_FILE) for _ in range(4)]
        await asyncio.gather(*(each.put(Put(Key("me", f"{n}"), b"")) for n, each in enumerate(opened)))
        assert len(await opened[0].scan("me")) == 4
        for each in opened:
            await each.close()


async def test_the_oldest_records_give_way_in_a_bounded_file(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    store = StoreInFile(tmp_path / "r.sqlite", IN_FILE, Bounds(4, 1000), clock)

    async def put(name: int, body: bytes) -> None:
        clock.now += 1
        await store.put(Put(Key("me", str(name)), body, ttl_s=100))

    async def left() -> list[int]:
        return sorted(map(int, await store.scan("me")))

    for number in range(5):
        await put(number, b"x")
    assert await left() == [1, 2, 3, 4], "more than 4 records"
    await put(1, b"y" * 500)
    await put(5, b"z" * 500)
    assert await left() == [1, 5], "more than 1000 bytes, and 1 was written after 2, 3 and 4"
    clock.now += 100
    assert await left() == []
    await put(5, b"z")
    assert await left() == [5]
    await store.close()


@pytest.mark.parametrize("find_place", [in_a_file, in_redis])
async def test_a_place_that_is_away_is_told_without_its_password_and_may_come_back(
    redis: RedisServer, tmp_path: Path, find_place: FindPlace
) -> None:
    place, key = find_place(redis, tmp_path), Key("me", "a")
    first, second = (open_store(place.address, IN_FILE, IN_REDIS) for _ in "ab")
    for each in (first, second):
        await each.put(Put(key, b"1"))
    await place.leave()
    try:
        for call in (first.get(key), first.put(Put(key, b"2")), second.delete(key), second.scan("me")):
            with pytest.raises(SluiceError) as refused:
                await call
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert SECRET not in refused.value.message
        assert all("the store" in each.problem() for each in (first, second))
    finally:
        await place.come_back()

    async def answers() -> bool:
        try:
            return await second.put(Put(key, b"3"))
        except SluiceError:
            return False

    await until(answers)
    found = await first.get(key)
    assert found is not None and found.body == b"3"
    await until(lambda: first.problem() == "")
    for each in (first, second):
        await each.close()
