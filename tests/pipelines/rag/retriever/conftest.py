from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.retriever import RetrieverModel
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import CollectionSpec, hash_key
from tests.pipelines.rag.retriever.parts import DIM, library_of, loaded
from tests.pipelines.rag.stores.corpus import put

TEXTS = {
    "queue": "A request waits in the queue until blocks are free.",
    "cancel": "Cancelling a request frees its blocks at once.",
    "ship": "Shipping takes five business days.",
}
"""Texts whose vectors are the directions 0, 1 and 2."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """The collection `docs` with three documents, the empty collection `new`, and `mine`, which has an owner."""
    store = SqliteStore(tmp_path / "rag.sqlite")
    await store.open()
    await store.create_collection(CollectionSpec("docs", "query_encoder", DIM))
    await store.create_collection(CollectionSpec("new", "query_encoder", DIM))
    await store.create_collection(CollectionSpec("mine", "query_encoder", DIM, (hash_key("open sesame"),)))
    directions = np.eye(DIM, dtype=np.float32)
    for direction, (name, text) in zip(directions, TEXTS.items(), strict=False):
        row = np.asarray(direction[np.newaxis], np.float32)
        await put(store, name, [text], vectors=row, title=name.title(), heading="Use", metadata={"kind": name[0]})
        await put(store, name, [text], vectors=row, collection="mine")
    yield store
    await store.close()


@pytest.fixture
def library(store: SqliteStore) -> DocumentLibrary:
    return library_of(store)


@pytest.fixture
async def model(tmp_path: Path, library: DocumentLibrary) -> AsyncIterator[RetrieverModel]:
    async with loaded(tmp_path, library) as model:
        yield model
