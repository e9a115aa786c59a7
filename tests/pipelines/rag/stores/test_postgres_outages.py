"""A Postgres server that is missing, stops, freezes or refuses connections."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace

import psycopg
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.stores.postgres.store import PostgresStore
from sluice.state.postgres import ConnectionLimits, PostgresPool, parse_address
from tests.pipelines.rag.stores.corpus import SPEC, ids, matching, nearest, put, unit_vector
from tests.pipelines.rag.stores.postgres_fixture import PASSWORD, shared_server
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

PATIENT = ConnectionLimits(PATIENCE_S, PATIENCE_S, PATIENCE_S, max_connections=3)
BRIEF = ConnectionLimits(connect_timeout_s=1.0, statement_timeout_s=0.5, acquire_timeout_s=0.5, max_connections=3)
"""For calls that are to fail: on a busy machine others may too."""


class Stores:
    """Opens stores and closes them after the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.server = shared_server()
        self.database = self.server.create_database()
        self._stack = stack

    def store(self, url: str = "", limits: ConnectionLimits = PATIENT) -> PostgresStore:
        store = PostgresStore(url or self.server.url(self.database), limits)
        self._stack.push_async_callback(store.close)
        return store

    async def filled(self) -> PostgresStore:
        store = self.store()
        await store.open()
        await store.create_collection(SPEC)
        await put(store, "a", ["quick fox"])
        return store


@pytest.fixture
async def stores() -> AsyncIterator[Stores]:
    async with AsyncExitStack() as stack:
        yield Stores(stack)


async def fault(call: Awaitable[object]) -> str:
    """Return the message of a call that fails with UNAVAILABLE, without the password."""
    with pytest.raises(SluiceError) as caught:
        await call
    assert caught.value.code is ErrorCode.UNAVAILABLE
    for secret in (PASSWORD, "s3cret", "wrong%"):
        assert secret not in caught.value.message
    return caught.value.message


async def test_calls_fail_at_once_until_the_server_is_back(stores: Stores) -> None:
    asked, idle, new = await stores.filled(), stores.store(), stores.store()
    await idle.open()
    await asyncio.gather(*(matching(idle, "fox") for _ in range(3)))  # so that several connections are kept
    stores.server.crash()
    try:
        name = f"Postgres store 127.0.0.1:{stores.server.port}/{stores.database}"
        assert (await fault(new.open())).startswith(f"{name} is not available: ")
        assert "refused" in await fault(new.collections())
        faults = await asyncio.gather(*(fault(nearest(asked, unit_vector(0))) for _ in range(20)))
        assert all(name in each for each in faults)
    finally:
        stores.server.start()
    for store in (idle, idle, idle, idle, asked, new):
        assert ids(await matching(store, "fox")) == ["a"]


async def test_a_connection_that_is_left_within_a_transaction_is_not_used_again(stores: Stores) -> None:
    pool = PostgresPool(parse_address(stores.server.url(stores.database)), replace(PATIENT, max_connections=1))
    pool.open()
    async with pool.session() as session:
        await session.execute("BEGIN; CREATE TABLE left_open ()")
    async with pool.session() as session:
        found = await (await session.execute("SELECT to_regclass('left_open')")).fetchone()
    await pool.close()
    assert found == (None,)


async def test_a_crash_in_the_middle_of_a_put_leaves_what_was_there(stores: Stores) -> None:
    store = await stores.filled()
    holder = await psycopg.AsyncConnection.connect(stores.server.url(stores.database))
    await holder.execute("SELECT FROM sluice_rag_collections FOR NO KEY UPDATE")
    putting = asyncio.create_task(put(store, "a", ["slow dog"] * 300))
    await _is_waiting_for_lock(stores)  # with all of the document written, and nothing committed
    await asyncio.to_thread(stores.server.crash)
    stores.server.start()
    await fault(putting)
    await holder.close()
    assert [hit.text for hit in await matching(store, "fox dog")] == ["quick fox"]
    assert (await store.collection("docs")).num_chunks == 1


async def test_calls_to_a_frozen_server_time_out(stores: Stores) -> None:
    await stores.filled()
    store = stores.store(limits=BRIEF)
    await until(lambda: _opens(store))
    with stores.server.frozen():
        assert "no answer within" in await fault(matching(store, "fox"))
        assert "no connection within" in await fault(stores.store(limits=BRIEF).open())
    await until(lambda: _answers(store))


async def _opens(store: PostgresStore) -> bool:
    try:
        await store.open()
    except SluiceError:
        return False
    return True


async def _answers(store: PostgresStore) -> bool:
    try:
        return ids(await matching(store, "fox")) == ["a"]
    except SluiceError:
        return False


async def test_a_statement_that_takes_too_long_is_ended(stores: Stores) -> None:
    await stores.filled()
    store = stores.store(limits=BRIEF)
    await until(lambda: _opens(store))
    async with await psycopg.AsyncConnection.connect(stores.server.url(stores.database)) as holder:
        await holder.execute("LOCK TABLE sluice_rag_collections")
        assert "took longer than 0.5 s" in await fault(store.collections())
    await until(lambda: _answers(store))


async def test_a_call_that_waits_too_long_for_a_connection_fails(stores: Stores) -> None:
    await stores.filled()
    store = stores.store(limits=replace(PATIENT, acquire_timeout_s=0.2, max_connections=2))
    await store.open()
    assert len(await store.collections()) == 1
    async with await psycopg.AsyncConnection.connect(stores.server.url(stores.database)) as holder:
        await holder.execute("LOCK TABLE sluice_rag_collections")
        held = [asyncio.create_task(store.collections()) for _ in range(2)]
        await _is_waiting_for_lock(stores)
        assert "all 2 connections were busy for 0.2 s" in await fault(store.collections())
    assert [len(found) for found in await asyncio.gather(*held)] == [1, 1]
    assert len(await store.collections()) == 1


async def _is_waiting_for_lock(stores: Stores) -> None:
    await until(lambda: asyncio.to_thread(_num_waiting, stores.server.url(stores.database)))


def _num_waiting(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
    return row[0] if row else 0


async def test_a_wrong_password_a_missing_database_and_a_missing_role_are_reported(stores: Stores) -> None:
    server = stores.server
    wrong = stores.store(server.url(stores.database, password="wrong%"))
    assert 'password authentication failed for user "postgres"' in await fault(wrong.open())
    missing = stores.store(server.url("nowhere"))
    assert 'database "nowhere" does not exist' in await fault(missing.open())
    server.execute("CREATE DATABASE nowhere")
    assert await missing.collections() == []


async def test_a_host_that_does_not_exist_is_reported(stores: Stores) -> None:
    store = stores.store("postgresql://postgres:s3cret@host.invalid/rag")
    assert "Postgres store host.invalid:5432/rag" in await fault(store.open())


async def test_a_database_made_anew_is_empty_and_serves(stores: Stores) -> None:
    store = await stores.filled()
    stores.server.execute(f"DROP DATABASE {stores.database} WITH (FORCE)")
    await fault(store.collections())
    stores.server.execute(f"CREATE DATABASE {stores.database}")
    assert await store.collections() == []
    await store.create_collection(SPEC)
    await put(store, "b", ["slow dog"])
    assert ids(await nearest(store, unit_vector(0))) == ["b"]


async def test_a_role_that_may_not_create_pgvector_gets_the_statement_to_run(stores: Stores) -> None:
    server = stores.server
    server.execute(f"CREATE ROLE plain LOGIN PASSWORD 's3cret'; ALTER DATABASE {stores.database} OWNER TO plain")
    store = stores.store(server.url(stores.database, user="plain", password="s3cret"))
    assert "as a superuser, run CREATE EXTENSION vector" in await fault(store.open())
    server.execute("CREATE EXTENSION vector", stores.database)
    await store.create_collection(SPEC)
    await put(store, "a", ["quick fox"])
    assert ids(await matching(store, "fox")) == ["a"]


async def test_a_read_only_role_is_reported(stores: Stores) -> None:
    await stores.filled()
    stores.server.execute("CREATE ROLE reader LOGIN PASSWORD 's3cret'")
    stores.server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", stores.database)
    store = stores.store(stores.server.url(stores.database, user="reader", password="s3cret"))
    await store.open()
    assert ids(await matching(store, "fox")) == ["a"]
    assert "permission denied" in await fault(put(store, "b", ["dog"]))


async def test_a_server_without_pgvector_gets_the_package_to_install(stores: Stores) -> None:
    store = stores.store()
    with stores.server.without_pgvector():
        assert "it lacks pgvector: install it on the server" in await fault(store.open())
    assert await store.collections() == []
