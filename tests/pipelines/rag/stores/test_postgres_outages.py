"""A Postgres server that is missing, stops, freezes or refuses connections."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest

from pipelines.rag.stores.postgres.connections import ConnectionLimits
from pipelines.rag.stores.postgres.store import PostgresStore
from sluice.errors import ErrorCode, SluiceError
from tests.pipelines.rag.stores.corpus import SPEC, ids, matching, nearest, put, unit_vector
from tests.pipelines.rag.stores.postgres_fixture import BINARIES, PASSWORD, PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.slow

QUICK = ConnectionLimits(connect_timeout_s=1.0, statement_timeout_s=0.5, acquire_timeout_s=0.5, max_connections=3)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


class Stores:
    """Opens stores and closes them after the test."""

    def __init__(self, server: PostgresServer, stack: AsyncExitStack) -> None:
        self.server = server
        self.database = server.create_database()
        self._stack = stack

    def store(self, url: str = "", limits: ConnectionLimits = QUICK) -> PostgresStore:
        store = PostgresStore(url or self.server.url(self.database), limits)
        self._stack.push_async_callback(store.close)
        return store

    async def filled(self, limits: ConnectionLimits = QUICK) -> PostgresStore:
        store = self.store(limits=limits)
        await store.open()
        await store.create_collection(SPEC)
        await put(store, "a", ["quick fox"])
        return store


@pytest.fixture
async def stores(server: PostgresServer) -> AsyncIterator[Stores]:
    async with AsyncExitStack() as stack:
        yield Stores(server, stack)


async def fault(call: Awaitable[object], within_s: float = 4.0) -> str:
    """Return the message of a call that fails with UNAVAILABLE, in time and without the password."""
    begun = time.monotonic()
    with pytest.raises(SluiceError) as caught:
        await call
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert time.monotonic() - begun < within_s
    for secret in (PASSWORD, "s3cret", "wrong%"):
        assert secret not in caught.value.message
    return caught.value.message


async def test_a_server_that_is_down_is_named_and_found_when_it_is_back(stores: Stores) -> None:
    name = f"Postgres store 127.0.0.1:{stores.server.port}/{stores.database}"
    stores.server.crash()
    store = stores.store()
    try:
        assert (await fault(store.open())).startswith(f"{name} is not available: ")
        assert "refused" in await fault(store.collections())
    finally:
        stores.server.start()
    await store.create_collection(SPEC)
    assert (await store.collection("docs")).spec == SPEC


async def test_a_restart_of_the_server_fails_no_call(stores: Stores) -> None:
    store = await stores.filled()
    await asyncio.gather(*(matching(store, "fox") for _ in range(3)))  # so that several connections are kept
    stores.server.crash()
    stores.server.start()
    for _ in range(4):
        assert ids(await matching(store, "fox")) == ["a"]


async def test_a_server_that_stops_fails_all_calls_at_once_and_recovers(stores: Stores) -> None:
    store = await stores.filled()
    stores.server.crash()
    try:
        faults = await asyncio.gather(*(fault(nearest(store, unit_vector(0))) for _ in range(20)))
        assert all(store.name in each for each in faults)
    finally:
        stores.server.start()
    assert ids(await nearest(store, unit_vector(0))) == ["a"]


async def test_a_crash_in_the_middle_of_a_put_leaves_what_was_there(stores: Stores) -> None:
    store = await stores.filled(ConnectionLimits(statement_timeout_s=20))
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
    store = await stores.filled()
    with stores.server.frozen():
        assert "no answer within" in await fault(matching(store, "fox"))
        assert "no connection within" in await fault(stores.store().open())
    assert ids(await matching(store, "fox")) == ["a"]


async def test_a_statement_that_takes_too_long_is_ended(stores: Stores) -> None:
    store = await stores.filled()
    async with await psycopg.AsyncConnection.connect(stores.server.url(stores.database)) as holder:
        await holder.execute("LOCK TABLE sluice_rag_collections")
        assert "took longer than 0.5 s" in await fault(store.collections())
    assert len(await store.collections()) == 1


async def test_a_call_that_waits_too_long_for_a_connection_fails(stores: Stores) -> None:
    limits = ConnectionLimits(statement_timeout_s=20, acquire_timeout_s=0.2, max_connections=2)
    store = await stores.filled(limits)
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


async def test_a_server_without_pgvector_gets_the_package_to_install() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = PostgresServer(_installed_without_pgvector(Path(folder)))
        try:
            server.start()
            store = PostgresStore(server.url(), QUICK)
            assert "it lacks pgvector: install it on the server" in await fault(store.open())
            await store.close()
        finally:
            server.remove()


def _installed_without_pgvector(folder: Path) -> Path:
    """Return the binaries of a copy of the wheel."""
    folder.chmod(0o755)  # for who runs the server where the tests run as root
    wheel = BINARIES.parents[1]
    for part in (wheel / "pginstall", wheel.with_name("pgserver.libs")):
        if part.exists():
            shutil.copytree(part, folder / part.relative_to(wheel.parent))
    (control,) = folder.rglob("vector.control")
    control.unlink()
    return folder / "pgserver" / "pginstall" / "bin"
