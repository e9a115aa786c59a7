"""The behaviour that all stores share: collections, documents, concurrency."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.filters import Operator
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import CandidateQuery, CollectionSpec, Metadata
from tests.pipelines.rag.stores.corpus import (
    DIM,
    SPEC,
    document_of,
    ids,
    matching,
    nearest,
    put,
    unit_vector,
    unit_vectors,
    where,
)

OWNED = CollectionSpec("owned", "another_encoder", 3, ("a" * 64, "b" * 64))


# --- collections


async def test_a_collection_keeps_what_it_was_made_with(store: DocumentStore) -> None:
    made = await store.create_collection(OWNED)
    assert made == await store.collection("owned")
    assert (made.spec, made.num_documents, made.num_chunks) == (OWNED, 0, 0)
    assert made.created_s > 1_600_000_000


async def test_collections_come_by_name(store: DocumentStore) -> None:
    for name in ("b", "C", "a", "a.b-c_d"):
        await store.create_collection(CollectionSpec(name, "encoder", DIM))
    assert [info.spec.name for info in await store.collections()] == ["C", "a", "a.b-c_d", "b"]


async def test_a_name_is_taken_once(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    with pytest.raises(SluiceError) as caught:
        await store.create_collection(CollectionSpec("docs", "another", 3))
    assert (caught.value.code, caught.value.param) == (ErrorCode.ALREADY_EXISTS, "collection")
    assert (await store.collection("docs")).spec == SPEC


async def test_without_the_collection_every_method_says_so(store: DocumentStore) -> None:
    document, chunks = document_of("a", ["text"])
    calls = (
        store.collection("none"),
        store.delete_collection("none"),
        store.put_document("none", document, chunks, unit_vectors(1, 0)),
        store.delete_document("none", "a"),
        store.document("none", "a"),
        store.documents("none"),
        store.document_info("none", "a"),
        store.candidates("none", CandidateQuery(unit_vector(0), "text", 4)),
    )
    for call in calls:
        with pytest.raises(SluiceError, match="none") as caught:
            await call
        assert (caught.value.code, caught.value.param) == (ErrorCode.NOT_FOUND, "collection")


async def test_a_deleted_collection_takes_all_with_it(store: DocumentStore) -> None:
    for spec in (SPEC, CollectionSpec("other", "encoder", DIM)):
        await store.create_collection(spec)
        await put(store, "a", ["quick fox"], collection=spec.name, metadata={"year": 2025})
    await store.delete_collection("docs")
    assert [info.spec.name for info in await store.collections()] == ["other"]
    assert ids(await matching(store, "fox", collection="other")) == ["a"]
    again = await store.create_collection(CollectionSpec("docs", "encoder", 3))
    assert (again.num_documents, again.num_chunks) == (0, 0)
    assert await store.documents("docs") == []
    found = await store.candidates("docs", CandidateQuery(unit_vector(0, 3), "quick fox", 4))
    assert not found.by_vector
    assert not found.by_text


async def test_collections_do_not_mix(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await store.create_collection(OWNED)
    await put(store, "a", ["quick fox"])
    await put(store, "b", ["quick dog"], collection="owned", vectors=unit_vectors(1, 1, 3))
    assert ids(await matching(store, "quick")) == ["a"]
    assert ids(await matching(store, "quick", collection="owned")) == ["b"]
    assert ids(await nearest(store, unit_vector(5, 3), collection="owned")) == ["b"]
    assert await store.document("docs", "b") is None
    assert [info.id for info in await store.documents("owned")] == ["b"]


# --- documents


async def test_a_document_comes_back_whole(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    metadata: Metadata = {
        "product": "sluice",
        "year": 2025,
        "ratio": 0.5,
        "public": True,
        "reviewer": None,
        "é'\"$.": 1,
    }
    document = await put(store, "docs/a b'c\".md", ["naïve 東京", "🦊 fox"], title="T'itle", metadata=metadata)
    assert await store.document("docs", document.info.id) == document
    info = await store.document_info("docs", document.info.id)
    assert info == document.info
    assert info is not None
    assert type(info.metadata["public"]) is bool
    assert type(info.metadata["year"]) is int
    counted = await store.collection("docs")
    assert (counted.num_documents, counted.num_chunks) == (1, 2)


async def test_what_is_not_there_is_none(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    assert await store.document("docs", "a") is None
    assert await store.document_info("docs", "a") is None
    assert not await store.delete_document("docs", "a")


async def test_documents_come_in_pages_by_id(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    names = ["B", "a", "a/b", "b", "z", "é"]
    for name in reversed(names):
        await put(store, name, [name])
    assert [info.id for info in await store.documents("docs")] == names
    assert [info.id for info in await store.documents("docs", limit=2)] == ["B", "a"]
    assert [info.id for info in await store.documents("docs", after="a", limit=3)] == ["a/b", "b", "z"]
    assert [info.id for info in await store.documents("docs", after="aa")] == ["b", "z", "é"]
    assert await store.documents("docs", after="é") == []


async def test_a_document_is_replaced(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await put(store, "a", ["old fox", "older fox"], metadata={"year": 2024}, title="Old")
    new = await put(store, "a", ["new dog"], metadata={"month": 5}, title="New")
    assert await store.document("docs", "a") == new
    counted = await store.collection("docs")
    assert (counted.num_documents, counted.num_chunks) == (1, 1)
    assert not await matching(store, "old fox")
    assert not await nearest(store, unit_vector(0), filter=where("year", Operator.EQ, 2024))
    (hit,) = await nearest(store, unit_vector(0), filter=where("month", Operator.EQ, 5))
    assert (hit.text, hit.title, hit.metadata) == ("new dog", "New", {"month": 5})


@pytest.mark.parametrize("shape", [(1, DIM), (3, DIM), (2, DIM - 1), (2, DIM + 1), (2, 0)])
async def test_vectors_must_fit_collection_and_chunks(store: DocumentStore, shape: tuple[int, int]) -> None:
    await store.create_collection(SPEC)
    before = await put(store, "a", ["one"])
    document, chunks = document_of("a", ["one", "two"])
    with pytest.raises(SluiceError) as caught:
        await store.put_document("docs", document, chunks, np.zeros(shape, np.float32))
    assert caught.value.code is ErrorCode.INVALID
    assert await store.document("docs", "a") == before


# --- at the same time


async def test_many_may_start_at_once_and_one_makes_a_collection(stores: Callable[[], DocumentStore]) -> None:
    gateways = [stores() for _ in range(6)]
    await asyncio.gather(*(each.open() for each in [*gateways, *gateways]))
    made = await asyncio.gather(*(each.create_collection(SPEC) for each in gateways), return_exceptions=True)
    faults = [each.code for each in made if isinstance(each, SluiceError)]
    assert faults == [ErrorCode.ALREADY_EXISTS] * 5
    for each in gateways:
        assert [info.spec for info in await each.collections()] == [SPEC]


async def test_a_search_sees_all_of_a_version_or_none_of_it(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    query = unit_vector(0)
    await put(store, "a", ["common v0"] * 5)
    done = asyncio.Event()

    async def replace() -> None:
        for version in range(1, 25):
            await put(store, "a", [f"common v{version}"] * (5 + version % 3))
        done.set()

    async def look() -> int:
        num_looks = 0
        while not done.is_set():
            found = await store.candidates("docs", CandidateQuery(query, "common", 50))
            for hits in (found.by_vector, found.by_text):
                (text,) = {hit.text for hit in hits}
                assert len(hits) == 5 + int(text.removeprefix("common v")) % 3
            assert {hit.text for hit in found.by_vector} == {hit.text for hit in found.by_text}
            num_looks += 1
        return num_looks

    _, *looks = await asyncio.gather(replace(), look(), look(), look())
    assert all(looks)


async def test_parallel_changes_of_two_gateways_all_take_place(
    store: DocumentStore, stores: Callable[[], DocumentStore]
) -> None:
    other = stores()
    await other.open()
    both = (store, other)
    await store.create_collection(SPEC)
    await asyncio.gather(*(put(both[index % 2], f"d{index:02}", ["common"]) for index in range(20)))
    await asyncio.gather(*(both[index % 4 // 2].delete_document("docs", f"d{index:02}") for index in range(0, 20, 2)))
    assert [info.id for info in await store.documents("docs")] == [f"d{index:02}" for index in range(1, 20, 2)]
    assert (await store.collection("docs")).num_chunks == 10
    assert len(await matching(other, "common", limit=50)) == 10


async def test_puts_of_one_document_leave_one_version_whole(
    store: DocumentStore, stores: Callable[[], DocumentStore]
) -> None:
    other = stores()
    await other.open()
    await store.create_collection(SPEC)
    versions = [(gateway, f"v{number}", 2 + number) for number, gateway in enumerate((store, other) * 6)]
    await asyncio.gather(*(put(gateway, "a", [f"common {version}"] * num) for gateway, version, num in versions))
    kept = await store.document("docs", "a")
    assert kept is not None
    hits = await matching(other, "common", limit=100)
    assert {hit.text for hit in hits} == set(kept.text.split("\n"))
    assert len(hits) == kept.info.num_chunks
    for _ in range(10):
        _, was_there = await asyncio.gather(put(store, "a", ["new"]), other.delete_document("docs", "a"))
        counted = await store.collection("docs")
        assert counted.num_documents == len(await other.documents("docs"))
        await put(store, "a", ["old"])
        assert was_there


async def test_a_cancelled_search_leaves_the_store_whole(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await put(store, "a", ["common"] * 200)
    searches = [asyncio.create_task(matching(store, "common")) for _ in range(20)]
    await asyncio.sleep(0)
    for search in searches[::2]:
        search.cancel()
    answers = await asyncio.gather(*searches, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert [len(answer) for answer in answers[1::2] if not isinstance(answer, BaseException)] == [10] * 10
    await put(store, "b", ["common"])
    assert len(await matching(store, "common", limit=500)) == 201


async def test_a_closed_store_refuses_and_opens_again(store: DocumentStore) -> None:
    await store.create_collection(SPEC)
    await put(store, "a", ["fox"])
    await store.close()
    await store.close()
    with pytest.raises(SluiceError) as caught:
        await store.collections()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert store.name in caught.value.message
    await store.open()
    assert ids(await matching(store, "fox")) == ["a"]
