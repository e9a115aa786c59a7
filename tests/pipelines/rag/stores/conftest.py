"""Fixtures that run the tests of the contract with every store."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.opening import open_store


def _new_schema(folder: Path) -> str:
    """Name an empty schema of a real server. Skips the test if this machine cannot run one."""
    pytest.importorskip("psycopg")
    pytest.importorskip("pgserver")
    name: str = pytest.importorskip("tests.pipelines.rag.stores.postgres_fixture").new_schema()
    return name


PLACES: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda folder: str(folder / "rag.sqlite"),
    "postgres": _new_schema,
}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], DocumentStore]]:
    """Make stores, one of each gateway, over one empty place. They are closed after the test."""
    place = PLACES[request.param](tmp_path)
    async with AsyncExitStack() as stack:

        def make() -> DocumentStore:
            store = open_store(place)
            stack.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture
async def store(stores: Callable[[], DocumentStore]) -> DocumentStore:
    """An open, empty store of its own for each test."""
    made = stores()
    await made.open()
    return made
