"""Several stores over one database, as several gateways have: what only Postgres can get wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import psycopg
import pytest
import uvloop

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.stores.postgres.store import PostgresStore
from sluice.pipelines.rag.types import CollectionSpec
from tests.pipelines.rag.stores.corpus import DIM, SPEC, ids, matching, nearest, put, unit_vector
from tests.pipelines.rag.stores.postgres_fixture import new_schema, shared_server

pytestmark = pytest.mark.slow


class Gateways:
    """Stores over one new database."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.database = shared_server().create_database()
        self.url = shared_server().url(self.database)
        self._stack = stack

    def new(self, options: str = "") -> PostgresStore:
        store = PostgresStore(self.url + options)
        self._stack.push_async_callback(store.close)
        return store

    async def opened(self, num: int) -> list[PostgresStore]:
        stores = [self.new() for _ in range(num)]
        await asyncio.gather(*(store.open() for store in stores))
        return stores


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    async with AsyncExitStack() as stack:
        yield Gateways(stack)


async def test_all_may_start_on_an_empty_database_at_once(gateways: Gateways) -> None:
    stores = await gateways.opened(6)
    made = await asyncio.gather(*(store.create_collection(SPEC) for store in stores), return_exceptions=True)
    assert sum(isinstance(each, SluiceError) for each in made) == 5
    for store in stores:
        assert [info.spec for info in await store.collections()] == [SPEC]


async def test_a_collection_deleted_under_way_is_not_found_and_nothing_else(gateways: Gateways) -> None:
    one, other = await gateways.opened(2)
    for _ in range(3):
        await one.create_collection(SPEC)
        await put(one, "a", ["quick fox"] * 20)
        calls = [
            *(matching(one, "fox") for _ in range(5)),
            *(nearest(other, unit_vector(0)) for _ in range(5)),
            *(put(other, f"b{number}", ["quick dog"] * 20) for number in range(5)),
            one.delete_collection("docs"),
            *(matching(other, "fox") for _ in range(5)),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        assert {fault.code for fault in faults if isinstance(fault, SluiceError)} <= {ErrorCode.NOT_FOUND}
        assert all(isinstance(fault, SluiceError) for fault in faults)
        assert await other.collections() == []
    assert await _tables(gateways.url) == {"sluice_rag_collections", "sluice_rag_schema"}


async def test_schemas_of_one_database_do_not_mix(gateways: Gateways) -> None:
    one, other = gateways.new("?schema=team%20A"), gateways.new("?schema=b&application_name=two")
    await asyncio.gather(one.open(), other.open())
    await one.create_collection(SPEC)
    assert await other.collections() == []
    await other.create_collection(CollectionSpec("docs", "another", DIM))
    assert (await one.collection("docs")).spec == SPEC
    await put(one, "a", ["quick fox"])
    assert ids(await matching(one, "fox")) == ["a"]
    assert not await matching(other, "fox")


async def test_tables_of_a_later_version_are_left_alone(gateways: Gateways) -> None:
    (store,) = await gateways.opened(1)
    await store.create_collection(SPEC)
    shared_server().execute("UPDATE sluice_rag_schema SET version = 99", gateways.database)
    with pytest.raises(SluiceError, match="tables of version 99, and this Sluice knows version") as caught:
        await gateways.new().open()
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_vectors_too_long_for_an_index_are_found_all_the_same(gateways: Gateways) -> None:
    (store,) = await gateways.opened(1)
    await store.create_collection(CollectionSpec("long", "encoder", 3072))
    await put(store, "a", ["quick fox"], collection="long", vectors=unit_vector(3, 3072)[None])
    (hit,) = await nearest(store, unit_vector(3, 3072), collection="long")
    assert hit.score == pytest.approx(1.0, abs=1e-5)


def test_it_runs_under_uvloop() -> None:
    async def main() -> list[str]:
        store = PostgresStore(new_schema())
        await store.open()
        await store.create_collection(SPEC)
        await put(store, "a", ["quick fox"])
        found = ids(await matching(store, "fox"))
        await store.close()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == ["a"]


async def _tables(url: str) -> set[str]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        cursor = await connection.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'sluice%'")
        return {row[0] for row in await cursor.fetchall()}
