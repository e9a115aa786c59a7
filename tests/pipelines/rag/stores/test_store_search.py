"""The behaviour that all stores share: search by vector, by words and with filters."""

from collections.abc import Sequence
from itertools import chain

import apsw
import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.filters import Condition, Filter, Operator, Scalar
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.sqlite.filter_sql import select_documents
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import CandidateQuery, DocumentInfo, Metadata
from sluice.state.queries import query_rows
from tests.pipelines.rag.stores.corpus import (
    DIM,
    SPEC,
    ids,
    matching,
    nearest,
    put,
    unit_vector,
    unit_vectors,
    where,
)
from tests.pipelines.rag.stores.filter_model import fulfils

# --- vector search


async def test_the_nearest_come_first_with_their_cosine(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    vectors = {name: unit_vectors(7, seed) for seed, name in enumerate("abc")}
    for name, rows in vectors.items():
        await put(store, name, [f"{name}{i}" for i in range(7)], vectors=rows)
    query = unit_vector(99)
    expected = sorted(
        ((float(row @ query), f"{name}{i}") for name in vectors for i, row in enumerate(vectors[name])), reverse=True
    )
    hits = await nearest(store, query, limit=5)
    assert [hit.text for hit in hits] == [text for _, text in expected[:5]]
    for hit, (cosine, text) in zip(hits, expected, strict=False):
        assert hit.score == pytest.approx(cosine, abs=1e-5)
        assert hit.similarity == pytest.approx(cosine, abs=1e-5)
        assert f"{hit.document_id}{hit.chunk_index}" == text
        assert hit.vector is None


async def test_a_hit_says_where_it_is_from(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    document = await put(
        store, "a.md", ["first", "second 🦊"], title="Title", heading="One > Two", metadata={"year": 2025}
    )
    for hits in (await nearest(store, unit_vectors(2, 4)[1], limit=1), await matching(store, "second")):
        (hit,) = hits
        assert hit.key == ("a.md", 1)
        assert (hit.title, hit.heading, hit.metadata) == ("Title", "One > Two", {"year": 2025})
        assert document.text[hit.start : hit.end] == hit.text == "second 🦊"


async def test_hits_carry_vectors_where_asked(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    rows = unit_vectors(2, 3)
    await put(store, "a", ["fox", "dog"], vectors=rows)
    found = await store.candidates("docs", CandidateQuery(rows[1], "fox", 2, with_vectors=True))
    assert [hit.chunk_index for hit in found.by_vector] == [1, 0]
    for hit in (*found.by_vector, *found.by_text):
        assert hit.vector is not None
        assert hit.vector.dtype == np.float32
        assert np.array_equal(hit.vector, rows[hit.chunk_index])


async def test_a_query_of_another_length_is_refused(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await put(store, "a", ["fox"])
    for dim in (0, DIM - 1, DIM + 1):
        with pytest.raises(SluiceError, match=f"{DIM}") as caught:
            await nearest(store, np.ones(dim, np.float32))
        assert caught.value.code is ErrorCode.INVALID


async def test_both_rankings_come_from_one_question(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    rows = unit_vectors(3, 0)
    await put(store, "a", ["fox", "dog", "fox dog fox"], vectors=rows)
    found = await store.candidates("docs", CandidateQuery(rows[1], "fox", 3))
    assert found.by_vector[0].chunk_index == 1
    assert {hit.chunk_index for hit in found.by_text} == {0, 2}
    for hit in found.by_text:  # a word's hit has its cosine too, where there is a vector to compare with
        assert hit.similarity == pytest.approx(float(rows[hit.chunk_index] @ rows[1]), abs=1e-5)
    neither = await store.candidates("docs", CandidateQuery(None, None, 3))
    assert not neither.by_vector
    assert not neither.by_text


# --- words


async def test_words_are_found_in_text_heading_and_title(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await put(store, "text", ["the quick fox"])
    await put(store, "heading", ["other"], heading="Foxes > Quick")
    await put(store, "title", ["other"], title="A fox")
    await put(store, "none", ["nothing"])
    hits = await matching(store, "fox")
    assert set(ids(hits)) == {"text", "heading", "title"}
    assert all(hit.score > 0 and hit.similarity is None for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


async def test_any_word_suffices_and_rare_ones_count_more(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    for index in range(6):
        await put(store, f"common{index}", ["server and client"])
    await put(store, "rare", ["server and zebra"])
    await put(store, "both", ["zebra and okapi"])
    hits = await matching(store, "server zebra okapi")
    assert ids(hits)[:2] == ["both", "rare"]
    assert len(hits) == 8
    assert len(await matching(store, "server zebra okapi", limit=3)) == 3


TEXTS = {
    "stream": "Tokens are streamed.",
    "code": "Call str.partition, set max_num_seqs, start with --http-port 80.",
    "fox": "the quick fox ?! ...",
    "none": "nothing of the kind",
}
FOUND = {
    "stream": ("streams", "Streaming", "STREAM", "how does it stream?"),
    "code": (
        *("str.partition", "partition", "max_num_seqs", "seqs"),
        *("--http-port", "http", "port", "what is `max_num_seqs`?"),
    ),
    "fox": (
        *("fox AND (", "NEAR(fox, 2)", "text:fox", "-fox", "^fox", "fox*", "{text} : fox"),
        *("fox & ! |", "<-> fox:*", "\0fox", "\ud800fox", "%_\\fox"),
    ),
    "": ("", "   ", "?!", "...", "\0", '"', "'", '" OR "', "a'); DROP TABLE x; --"),
}
"""What a question finds first: other forms of words, names of code whole and in part; what users type is only words."""


async def test_a_question_finds_texts_by_its_words(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    for name, text in TEXTS.items():
        await put(store, name, [text])
    found = {(name, asked): ids(await matching(store, asked))[:1] for name, all in FOUND.items() for asked in all}
    assert found == {key: [key[0]] if key[0] else [] for key in found}


async def test_a_very_long_question_is_searched(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await put(store, "a", ["the quick fox"])
    hits = await matching(store, "fox " + " ".join(f"word{i}" for i in range(20_000)))
    assert ids(hits) == ["a"]


# --- filters

METADATA: dict[str, Metadata] = {
    "docs/a": {"product": "sluice", "year": 2024, "public": True},
    "docs/b": {"product": "sluice", "year": 2025.5, "public": False, "owner": None},
    "docs/c": {"product": "other", "year": "2025", "public": 1},
    "notes/d": {"product": "", "year": -3},
    "notes/é": {"product": "Ünïcode", "id": "hidden", "title": "hidden"},
    "e": {"a.b\"'$[0]": 2024, "product": "\ue000"},
}
VALUES: tuple[Scalar, ...] = (
    *("sluice", "", "docs/b", "docs/", "2025", "Ü", "é", "\ud7ff", "\U0010ffff"),
    *(2024, 2024.0, 2025.5, 0, 1, True, False, None),
)
KEYS = ("product", "year", "public", "owner", "id", "title", "a.b\"'$[0]", "")


def conditions() -> list[Condition]:
    ordered = (Operator.GT, Operator.GTE, Operator.LT, Operator.LTE)
    made = [Condition(key, Operator.EXISTS, wanted) for key in KEYS for wanted in (True, False)]
    for key in KEYS:
        for value in VALUES:
            made += [Condition(key, Operator.EQ, value), Condition(key, Operator.NE, value)]
            if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
                made += [Condition(key, operator, value) for operator in ordered]
            if isinstance(value, str):
                made.append(Condition(key, Operator.PREFIX, value))
        for values in ((), VALUES, VALUES[::2], VALUES[1::2]):
            made += [Condition(key, Operator.IN, values), Condition(key, Operator.NIN, values)]
    return made


async def _fulfilling(store: DocumentStore, conditions: Sequence[Condition]) -> list[set[str]]:
    """Return the documents that the store's own SQL for each condition finds, all at once: a search for each would
    take half a minute."""
    filters = [Filter((condition,)) for condition in conditions]
    if isinstance(store, SqliteStore):
        return await store._connections.read(_select_each, filters)
    postgres = pytest.importorskip("sluice.pipelines.rag.stores.postgres.search")
    texts, values = zip(*map(postgres.filter_condition, filters), strict=True)
    async with store._pool.session() as session:  # type: ignore[attr-defined]  # of Postgres
        [[table]] = await (await session.execute(_DOCUMENTS)).fetchall()
        parts = (f"SELECT {number}, d.id FROM {table} d WHERE {text}" for number, text in enumerate(texts))
        rows = await (await session.execute(" UNION ALL ".join(parts), list(chain(*values)))).fetchall()
    return [{name for number, name in rows if number == wanted} for wanted in range(len(filters))]


_DOCUMENTS = "SELECT 'sluice_rag_documents_' || id FROM sluice_rag_collections"


def _select_each(connection: apsw.Connection, filters: Sequence[Filter]) -> list[set[str]]:
    found = []
    for each in filters:
        selected = select_documents(1, each)
        names = query_rows(connection, f"SELECT name FROM documents WHERE id IN ({selected.text})", selected.values)
        found.append({name for (name,) in names})
    return found


async def _put_all(store: DocumentStore) -> list[DocumentInfo]:
    await store.create_collection(SPEC)
    return [(await put(store, name, ["common text"] * 2, metadata=each)).info for name, each in METADATA.items()]


async def test_every_condition_means_the_same_everywhere(store: DocumentStore) -> None:
    infos = await _put_all(store)
    expected = [{info.id for info in infos if fulfils(Filter((each,)), info)} for each in conditions()]
    found = await _fulfilling(store, conditions())
    wrong = [case for case in zip(conditions(), found, expected, strict=True) if case[1] != case[2]]
    assert not wrong


async def test_a_search_finds_what_fulfils_all_conditions(store: DocumentStore) -> None:
    infos = await _put_all(store)
    for operator in Operator:
        first = next(each for each in conditions() if each.operator is operator and each.value != ())
        filter = Filter((first, Condition("public", Operator.NE, 1)))
        expected = {info.id for info in infos if fulfils(filter, info)}
        found = await store.candidates("docs", CandidateQuery(unit_vector(0), "common", 100, filter))
        assert (set(ids(found.by_vector)), set(ids(found.by_text))) == (expected, expected), operator


async def test_a_filter_comes_before_the_limit(store: DocumentStore) -> None:
    """The best chunks that fulfil the filter are found, however low their rank among all."""
    await store.create_collection(SPEC)
    query = unit_vector(1)
    await put(store, "near", ["common common"] * 60, vectors=np.tile(query, (60, 1)), metadata={"kind": "near"})
    await put(store, "far", ["common " + "and " * 50], vectors=-query[None], metadata={"kind": "far"})
    filter = where("kind", Operator.EQ, "far")
    found = await store.candidates("docs", CandidateQuery(query, "common", 2, filter))
    assert (ids(found.by_vector), ids(found.by_text)) == (["far"], ["far"])
