"""Both stores of the ledger: each batch once, sums that equal the rows, and what queries return."""

import asyncio
from collections.abc import AsyncIterator
from datetime import date, timedelta
from itertools import count
from pathlib import Path

import apsw
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.ledger.rows import DAY_US, LedgerRow, day_number, sum_days
from sluice.gateway.tenancy.ledger.store import LEDGER_SCHEMA, LedgerBatch, LedgerStore, UsageQuery, open_ledger
from sluice.state.connections import Schema

DAY = date(2026, 3, 1)
_numbers = count()


def row(day: date = DAY, key: str = "k1", model: str = "rill", **fields: object) -> LedgerRow:
    arrived = day_number(day) * DAY_US + 1
    made = LedgerRow(
        *(arrived, arrived + 10, arrived + 20, "req", key, f"name of {key}", "team", model, "", "openai", "/v1/x"),
        *(10, 4, 5, "stop", 200, 100, 200, 7),
    )
    return made._replace(**fields)  # type: ignore[arg-type]


def batch(rows: list[LedgerRow], number: int = 1, writer: str = "a") -> LedgerBatch:
    return LedgerBatch(writer, number, rows, sum_days(rows))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "ledger.sqlite")
    fixture = pytest.importorskip("tests.pipelines.rag.stores.postgres_fixture")
    return f"{fixture.shared_server().url(fixture.shared_database())}?schema=ledger_{next(_numbers)}"


@pytest.fixture
async def store(place: str) -> AsyncIterator[LedgerStore]:
    opened = open_ledger(place)
    yield opened
    await opened.close()


async def read_all(store: LedgerStore, first: date = DAY, last: date = DAY) -> list[LedgerRow]:
    return [each async for page in store.read_rows(UsageQuery(first, last)) for each in page]


async def test_a_batch_is_written_once(store: LedgerStore) -> None:
    rows = [row(), row(key="k2", first_token_us=None, status=None, finish="cancelled"), row(model="é", request_id="x")]
    for _ in range(2):
        await store.write(batch(rows))
    await store.write(batch([row()], 2))
    await store.write(batch([row()], 1, "b"))
    assert await read_all(store) == [*rows, row(), row()]
    [total] = await store.sum_usage(UsageQuery(DAY, DAY, ()))
    assert total == (5, 0, 50, 20, 25, 500, 1000, 35)


async def test_usage_is_grouped_and_limited(store: LedgerStore) -> None:
    later = DAY + timedelta(days=2)
    rows = [row(), row(key="k2", tenant="other", status=503), row(later, model="m2"), row(DAY + timedelta(days=3))]
    await store.write(batch(rows))
    query = UsageQuery(DAY, later)
    counts = (10, 4, 5, 100, 200, 7)
    assert await store.sum_usage(query) == [
        (day_number(DAY), 2, 1, 20, 8, 10, 200, 400, 14),
        (day_number(later), 1, 0, *counts),
    ]
    assert await store.sum_usage(query._replace(group_by=("key", "model"), tenant="team")) == [
        ("k1", "m2", "name of k1", 1, 0, *counts),
        ("k1", "rill", "name of k1", 1, 0, *counts),
    ]
    assert await store.sum_usage(query._replace(group_by=("tenant",), key_id="k2")) == [("other", 1, 1, *counts)]
    assert await store.sum_usage(query._replace(group_by=(), key_id="nobody")) == [(0,) * 8]


async def test_old_rows_go_and_sums_stay(store: LedgerStore) -> None:
    later = DAY + timedelta(days=1)
    await store.write(batch([row(), row(), row(later)]))
    assert [await store.delete_before(later, 1) for _ in range(3)] == [1, 1, 0]
    assert await read_all(store, DAY, later) == [row(later)]
    assert (await store.sum_usage(UsageQuery(DAY, later, ())))[0][0] == 3


async def test_exports_read_page_by_page(store: LedgerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.gateway.tenancy.ledger.store.PAGE_ROWS", 2)
    rows = [row(request_id=str(n)) for n in range(5)]
    others = [row(key="k2"), row(tenant="other")]
    await store.write(batch([*others, *rows]))
    query = UsageQuery(DAY, DAY, key_id="k1", tenant="team")
    pages = [page async for page in store.read_rows(query)]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [each for page in pages for each in page] == rows
    assert await read_all(store) == [*others, *rows]


async def test_writers_share_one_place(store: LedgerStore, place: str) -> None:
    await store.write(batch([], 1))  # SQLite does not wait for another that turns a new file's log on
    writers = [open_ledger(place) for _ in range(8)]

    async def work(writer: LedgerStore, name: str) -> None:
        for number in range(5):
            await writer.write(batch([row(key=f"k{n % 3}") for n in range(20)], number, name))

    await asyncio.gather(*(work(each, str(n)) for n, each in enumerate(writers)))
    assert (await store.sum_usage(UsageQuery(DAY, DAY, ())))[0][0] == 800
    for each in writers:
        await each.close()


@pytest.mark.slow
async def test_a_database_that_is_away_is_told_and_may_come_back() -> None:
    server = pytest.importorskip("tests.pipelines.rag.stores.postgres_fixture").shared_server()
    database = server.create_database()
    store = open_ledger(server.url(database))
    await store.write(batch([row()]))
    server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
    with pytest.raises(SluiceError) as refused:
        await store.write(batch([row()], 2))
    assert refused.value.code is ErrorCode.UNAVAILABLE
    server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
    await store.write(batch([row()], 2))
    assert await read_all(store) == [row(), row()]
    await store.close()


@pytest.mark.parametrize(("num_steps", "new_columns"), [(1, 3), (2, 2)], ids=["routes", "sessions"])
async def test_a_file_from_before_these_columns_is_upgraded_and_keeps_its_rows(
    tmp_path: Path, num_steps: int, new_columns: int
) -> None:
    path = tmp_path / "ledger.sqlite"
    old = Schema(LEDGER_SCHEMA.application_id, LEDGER_SCHEMA.steps[:num_steps])
    kept, added = row(), row(route="fast", session="s/a", parent_session="s")
    columns = ", ".join(LedgerRow._fields[:-new_columns])
    connection = apsw.Connection(str(path))
    old.upgrade(connection)
    marks = ", ".join("?" * (len(kept) - new_columns))
    connection.execute(f"INSERT INTO sluice_calls ({columns}) VALUES ({marks})", kept[:-new_columns])
    connection.close()
    store = open_ledger(str(path))
    await store.write(batch([added]))
    assert await read_all(store) == [kept, added]
    await store.close()
