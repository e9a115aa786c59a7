"""Stores of one place behave like a list of documents and numpy, whatever is put, deleted and searched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import SluiceError
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.filters import Condition, Filter, Operator
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, CollectionSpec, DocumentInfo, Hit
from tests.pipelines.rag.stores.corpus import DIM, document_of, unit_vector, unit_vectors
from tests.pipelines.rag.stores.filter_model import fulfils

WORDS = ("amber", "birch", "cedar", "dune")
NUMBERS = count()

passages = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join), max_size=6)
names = st.sampled_from(["a", "b", "c/d", "c/é"])
scalars = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from(["", "x", "xy", "é"]))
metadata = st.dictionaries(st.sampled_from(["kind", "year"]), scalars, max_size=2)
conditions = st.builds(
    Condition,
    st.sampled_from(["kind", "year", "id"]),
    st.sampled_from([Operator.EQ, Operator.NE]),
    scalars,
) | st.builds(Condition, st.sampled_from(["kind", "id"]), st.just(Operator.PREFIX), st.sampled_from(["", "x", "c/"]))
filters = st.none() | st.builds(Filter, st.lists(conditions, min_size=1, max_size=2).map(tuple))


@dataclass(frozen=True, slots=True)
class Put:
    name: str
    passages: Sequence[str]
    metadata: dict[str, str | int | bool | None]
    seed: int


@dataclass(frozen=True, slots=True)
class Delete:
    name: str


@dataclass(frozen=True, slots=True)
class Search:
    words: Sequence[str]
    seed: int
    limit: int
    filter: Filter | None


steps = st.lists(
    st.builds(Put, names, passages, metadata, st.integers(0, 99))
    | st.builds(Delete, names)
    | st.builds(Search, st.lists(st.sampled_from(WORDS), max_size=3), st.integers(0, 99), st.integers(1, 8), filters),
    max_size=12,
)


@dataclass(slots=True)
class Shelf:
    """Documents, with their passages and vectors."""

    documents: dict[str, tuple[DocumentInfo, Sequence[str], Vectors]] = field(default_factory=dict)

    def among(self, filter: Filter | None) -> list[tuple[str, int, str, Vector]]:
        return [
            (name, index, passage, vectors[index])
            for name, (info, texts, vectors) in self.documents.items()
            if fulfils(filter, info)
            for index, passage in enumerate(texts)
        ]


async def _put(store: DocumentStore, collection: str, shelf: Shelf, step: Put) -> None:
    document, chunks = document_of(step.name, step.passages, metadata=step.metadata)
    vectors = unit_vectors(len(chunks), step.seed)
    await store.put_document(collection, document, chunks, vectors)
    shelf.documents[step.name] = document.info, step.passages, vectors


async def _delete(store: DocumentStore, collection: str, shelf: Shelf, step: Delete) -> None:
    existed = shelf.documents.pop(step.name, None) is not None
    assert await store.delete_document(collection, step.name) is existed


async def _search(store: DocumentStore, collection: str, shelf: Shelf, step: Search) -> None:
    query = unit_vector(step.seed)
    asked = CandidateQuery(query, " ".join(step.words), step.limit, step.filter)
    found: CandidateHits = await store.candidates(collection, asked)
    among = shelf.among(step.filter)
    _check_by_vector(found.by_vector, among, query, step.limit)
    _check_by_text(found.by_text, among, set(step.words), step.limit)


def _check_by_vector(hits: Sequence[Hit], among: list[tuple[str, int, str, Vector]], query: Vector, limit: int) -> None:
    """Compare cosines, since equal vectors may come in any order."""
    cosines = {(name, index): float(vector @ query) for name, index, _, vector in among}
    best = sorted(cosines.values(), reverse=True)[:limit]
    assert np.allclose([hit.score for hit in hits], best, atol=1e-5)
    assert len({hit.key for hit in hits}) == len(hits)
    for hit in hits:
        assert abs(cosines[hit.key] - hit.score) < 1e-5


def _check_by_text(hits: Sequence[Hit], among: list[tuple[str, int, str, Vector]], words: set[str], limit: int) -> None:
    matching = {(name, index) for name, index, passage, _ in among if words & set(passage.split())}
    assert {hit.key for hit in hits} <= matching
    assert len(hits) == min(limit, len(matching))


async def _check_lists(store: DocumentStore, collection: str, shelf: Shelf) -> None:
    expected = [shelf.documents[name][0] for name in sorted(shelf.documents)]
    assert await store.documents(collection) == expected
    info = await store.collection(collection)
    assert info.num_documents == len(expected)
    assert info.num_chunks == sum(each.num_chunks for each in expected)


@pytest.fixture
async def gateways(store: DocumentStore, stores: Callable[[], DocumentStore]) -> tuple[DocumentStore, DocumentStore]:
    """Two stores over one place."""
    other = stores()
    await other.open()
    return store, other


@given(steps=steps)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_gateways_see_one_list_of_documents(
    gateways: tuple[DocumentStore, DocumentStore], steps: list[Put | Delete | Search]
) -> None:
    collection = f"c{next(NUMBERS)}"
    await gateways[0].create_collection(CollectionSpec(collection, "encoder", DIM))
    shelf = Shelf()
    for number, step in enumerate(steps):
        store = gateways[number % 2]
        match step:
            case Put():
                await _put(store, collection, shelf, step)
            case Delete():
                await _delete(store, collection, shelf, step)
            case Search():
                await _search(store, collection, shelf, step)
    await _check_lists(gateways[0], collection, shelf)
    await gateways[1].delete_collection(collection)
    with pytest.raises(SluiceError):
        await gateways[0].collection(collection)
