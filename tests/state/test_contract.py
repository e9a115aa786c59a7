"""What every store of state promises to the servers that share it: one table of stores, and each claim once.

Documents have a contract of their own in tests/pipelines/rag/stores, and quotas their arithmetic in
tests/gateway/quotas/test_redis_store.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.access.identity import NO_LIMITS, Identity, QuotaLimits
from sluice.gateway.access.keys import make_key, revoke_key, update_key
from sluice.gateway.access.store import KeyStore, open_keys
from sluice.gateway.http.openai.responses.records import ABSENT, RecordKey, RecordStore, SqliteRecords, StoreLimits
from sluice.gateway.http.openai.responses.redis_records import RedisRecords
from sluice.gateway.ledger.opening import open_ledger
from sluice.gateway.ledger.store import LedgerStore
from tests.gateway.ledger.test_stores import batch, read_all, row
from tests.serving.caching.parts import RedisServer
from tests.waiting import until

_NUMBERS = count(1)
SECRET = "s3cret"


class Shelf(Protocol):
    """A store as one server has it open: a number for each name."""

    async def put(self, name: str, number: int) -> None: ...
    async def get(self, name: str) -> int | None: ...
    async def delete(self, name: str) -> bool: ...
    async def close(self) -> None: ...


class _Keys:
    """Keys, whose tenants are the numbers."""

    def __init__(self, address: str) -> None:
        self.store: KeyStore = open_keys(address)
        self.close = self.store.close

    async def put(self, name: str, number: int) -> None:
        try:
            await self.store.add(make_key(Identity(name=name, tenant=str(number))).stored)
        except SluiceError as error:
            if error.code is not ErrorCode.ALREADY_EXISTS:
                raise
            await self.store.change(name, lambda key: update_key(key, {"tenant": str(number)}))

    async def get(self, name: str) -> int | None:
        found = [each.identity for each in await self.store.load() if each.is_active and each.name == name]
        assert len(found) <= 1
        return int(found[0].tenant) if found else None

    async def delete(self, name: str) -> bool:
        try:
            await self.store.change(name, revoke_key)
        except SluiceError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return False
        return True


class _Tenants:
    """Limits of tenants."""

    def __init__(self, address: str) -> None:
        self.store: KeyStore = open_keys(address)
        self.close = self.store.close

    async def put(self, name: str, number: int) -> None:
        await self.store.set_tenant(name, QuotaLimits(tokens_per_day=number))

    async def get(self, name: str) -> int | None:
        return (await self.store.load_tenants()).get(name, NO_LIMITS).tokens_per_day

    async def delete(self, name: str) -> bool:
        had = name in await self.store.load_tenants()
        await self.store.set_tenant(name, NO_LIMITS)
        return had


class _Responses:
    """Stored responses, which only who has read the last version replaces."""

    def __init__(self, address: str) -> None:
        limits = StoreLimits(ttl_s=1e6, max_records=1000, max_bytes=1 << 20)
        is_redis = address.startswith("redis:")
        self.store: RecordStore = RedisRecords(address, limits) if is_redis else SqliteRecords(Path(address), limits)
        self.close = self.store.close

    async def put(self, name: str, number: int) -> None:
        is_written = False
        while not is_written:
            found = await self.store.read(RecordKey("me", name))
            version = found.version if found else ABSENT
            is_written = await self.store.write(RecordKey("me", name), b"%d" % number, version)

    async def get(self, name: str) -> int | None:
        found = await self.store.read(RecordKey("me", name))
        return int(found.body) if found else None

    async def delete(self, name: str) -> bool:
        return await self.store.delete(RecordKey("me", name))


class _Ledger:
    """Rows of a ledger, which nobody deletes: a name's number is that of its last row."""

    def __init__(self, address: str) -> None:
        self.store: LedgerStore = open_ledger(address)
        self.close = self.store.close

    async def put(self, name: str, number: int) -> None:
        await self.store.write(batch([row(request_id=name, prompt_tokens=number)], 1, str(next(_NUMBERS))))

    async def get(self, name: str) -> int | None:
        found = [each.prompt_tokens for each in await read_all(self.store) if each.request_id == name]
        return found[-1] if found and found[-1] else None

    async def delete(self, name: str) -> bool:
        had = await self.get(name) is not None
        await self.put(name, 0)
        return had


class Place(NamedTuple):
    """Where servers share a store, and how it goes away and comes back."""

    address: str
    leave: Callable[[], Awaitable[None]]
    come_back: Callable[[], Awaitable[None]]


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


def in_postgres(redis: RedisServer, folder: Path) -> Place:
    server = pytest.importorskip("tests.pipelines.rag.stores.postgres_fixture").shared_server()
    database = server.create_database()

    async def leave() -> None:
        server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")

    async def come_back() -> None:
        server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")

    return Place(server.url(database), leave, come_back)


STORES: dict[str, tuple[Callable[[str], Shelf], Callable[[RedisServer, Path], Place]]] = {
    "keys in a file": (_Keys, in_a_file),
    "keys in Redis": (_Keys, in_redis),
    "tenants in a file": (_Tenants, in_a_file),
    "tenants in Redis": (_Tenants, in_redis),
    "responses in a file": (_Responses, in_a_file),
    "responses in Redis": (_Responses, in_redis),
    "the ledger in a file": (_Ledger, in_a_file),
    "the ledger in Postgres": (_Ledger, in_postgres),
}


class Servers(NamedTuple):
    """Two servers that share a place, and its name."""

    shelves: tuple[Shelf, Shelf]
    place: Place


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.slow] if "Postgres" in each else []) for each in STORES])
async def servers(request: pytest.FixtureRequest, redis: RedisServer, tmp_path: Path) -> AsyncIterator[Servers]:
    open_shelf, find_place = STORES[request.param]
    place = find_place(redis, tmp_path)
    async with AsyncExitStack() as stack:
        shelves = open_shelf(place.address), open_shelf(place.address)
        for each in shelves:
            stack.push_async_callback(each.close)
        yield Servers(shelves, place)


@pytest.mark.parametrize("find_place", [in_a_file, in_redis])
async def test_what_is_kept_for_a_time_is_gone_after_it(
    redis: RedisServer, tmp_path: Path, find_place: Callable[[RedisServer, Path], Place]
) -> None:
    shelf, key = _Responses(find_place(redis, tmp_path).address), RecordKey("me", "brief")
    await shelf.put("lasting", 1)
    await shelf.store.write(key, b"2", ABSENT, ttl_s=0.2)

    async def is_gone() -> bool:
        return await shelf.store.read(key) is None

    await until(is_gone)
    assert await shelf.get("lasting") == 1
    assert await shelf.store.write(key, b"3", ABSENT), "its version is forgotten too"
    await shelf.close()


STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 1)), max_size=8)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
async def test_servers_see_what_any_of_them_put_and_deleted(
    servers: Servers, steps: list[tuple[str, int, int]]
) -> None:
    prefix, expected = f"{next(_NUMBERS)}-", dict[str, int]()
    for name, number, at in steps:  # 0 deletes
        shelf = servers.shelves[at]
        if number:
            await shelf.put(prefix + name, number)
            expected[name] = number
        else:
            assert await shelf.delete(prefix + name) is (expected.pop(name, None) is not None)
        for reader in servers.shelves:
            assert {each: await reader.get(prefix + each) for each in "ab"} == {
                each: expected.get(each) for each in "ab"
            }


async def test_puts_at_the_same_time_all_stay_and_of_one_name_the_last(servers: Servers) -> None:
    puts = [(f"n{number}", number) for number in range(1, 13)] + [("same", number) for number in range(1, 9)]
    await asyncio.gather(*(servers.shelves[number % 2].put(name, number) for name, number in puts))
    for reader in servers.shelves:
        assert [await reader.get(f"n{number}") for number in range(1, 13)] == [*range(1, 13)]
    found = [await reader.get("same") for reader in servers.shelves]
    assert found[0] == found[1]
    assert found[0] in range(1, 9)


async def test_a_place_that_is_away_is_told_without_its_password_and_may_come_back(servers: Servers) -> None:
    first, second = servers.shelves
    await first.put("a", 1)
    await servers.place.leave()
    try:
        calls: list[Callable[[], Awaitable[object]]] = [
            *(lambda: first.get("a"), lambda: first.put("b", 2), lambda: second.delete("a"))
        ]
        for call in calls:
            with pytest.raises(SluiceError) as refused:
                await call()
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert SECRET not in refused.value.message
    finally:
        await servers.place.come_back()

    async def answers() -> bool:
        try:
            return await second.get("a") in (1, None)
        except SluiceError:
            return False

    await until(answers)
    await first.put("b", 2)
    assert await second.get("b") == 2
