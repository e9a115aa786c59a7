"""Fixtures that run the tests of the contract with every store."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pipelines.rag.stores.base import Store


@asynccontextmanager
async def sqlite_store(folder: Path) -> AsyncIterator[Store]:
    from pipelines.rag.stores.sqlite.store import SqliteStore

    store = SqliteStore(folder / "rag.sqlite")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def postgres_store() -> AbstractAsyncContextManager[Store]:
    """Return an empty schema of a real server. Skips the test if this machine cannot run one."""
    pytest.importorskip("psycopg")
    pytest.importorskip("pgserver")
    fixture = pytest.importorskip("tests.pipelines.rag.stores.postgres_fixture")
    made: AbstractAsyncContextManager[Store] = fixture.postgres_store()
    return made


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """An open, empty store of its own for each test."""
    context = sqlite_store(tmp_path) if request.param == "sqlite" else postgres_store()
    async with context as opened:
        yield opened
