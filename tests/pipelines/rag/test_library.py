"""Behaviour of a library in front of its store."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings, hash_text
from sluice.pipelines.rag.search import MAX_QUESTION_CHARS, SearchOptions, SearchQuery
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import CollectionSpec, DocumentFormat, RetrievalMode, Upload
from sluice.pipelines.text.citations import EncodingProgress
from tests.recordings import recorded

DIM = 64
MARKDOWN = DocumentFormat.MARKDOWN


class SilentStore(SqliteStore):
    """A store whose server does not respond: opening it blocks until it fails."""

    def __init__(self) -> None:
        super().__init__(None)
        self.num_opened = 0
        self.is_asked = asyncio.Event()
        self.is_given_up = asyncio.Event()

    async def open(self) -> None:
        self.num_opened += 1
        self.is_asked.set()
        await self.is_given_up.wait()
        raise SluiceError(ErrorCode.UNAVAILABLE, "no answer")


class GatedEncoder(TextEncoder):
    """Encodes texts, each in a direction of its own, when the test opens the gate. Tokens are words."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.is_asked, self.gate = asyncio.Event(), asyncio.Event()

    async def dim(self) -> int:
        return DIM

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        self.is_asked.set()
        await self.gate.wait()
        self.encoded += texts
        return np.stack([direction_of(text) for text in texts])

    async def token_starts(self, text: str) -> list[int]:
        return [word.start() for word in re.finditer(r"\S+", text)]


def direction_of(text: str) -> Vector:
    vector = np.random.default_rng(len(text)).standard_normal(DIM).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def upload(id: str, *sections: str) -> Upload:
    return Upload(
        id, "".join(f"# {each}\n\n{each} is {'very ' * 50} long.\n\n" for each in sections).encode(), MARKDOWN
    )


def no_encoder(name: str) -> TextEncoder:
    raise AssertionError(f"{name} is not wanted")


async def test_all_waiting_calls_fail_at_once_if_the_store_is_down() -> None:
    store = SilentStore()
    library = DocumentLibrary(store, no_encoder, LibrarySettings())
    waiting = [asyncio.create_task(library.collections()) for _ in range(5)]
    await store.is_asked.wait()
    await asyncio.sleep(0)  # by now the others stand in line
    store.is_given_up.set()
    heard = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(each) for each in heard] == ["no answer"] * 5
    assert store.num_opened == 1
    with pytest.raises(SluiceError, match="no answer"):  # who asks later makes another attempt
        await library.collections()
    assert store.num_opened == 2
    await library.close()


async def test_one_change_more_than_may_wait_is_rejected_with_retry_after(tmp_path: Path) -> None:
    is_read, may_go_on = asyncio.Event(), asyncio.Event()

    class SlowStore(SqliteStore):
        async def delete_document(self, collection: str, document_id: str) -> bool:
            is_read.set()
            await may_go_on.wait()
            return await super().delete_document(collection, document_id)

    store = SlowStore(tmp_path / "rag.sqlite")
    library = DocumentLibrary(store, no_encoder, LibrarySettings(num_parallel_puts=1, max_waiting=2))
    await store.open()
    await store.create_collection(CollectionSpec("docs", "none", 4))
    first = asyncio.create_task(library.delete_document("docs", "a"))
    await is_read.wait()
    others = [asyncio.create_task(library.delete_document("docs", name)) for name in "bcd"]
    done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    [refused] = [task.exception() for task in done]
    assert isinstance(refused, SluiceError)
    assert (refused.code, refused.retry_after_s) == (ErrorCode.OVERLOADED, 2.0)
    may_go_on.set()
    assert await asyncio.gather(first, *waiting) == [False, False, False]
    assert not await library.delete_document("docs", "e")
    await library.close()


async def test_a_question_that_is_too_long_is_refused_before_any_work() -> None:
    library = DocumentLibrary(SilentStore(), no_encoder, LibrarySettings())
    question = "word " * MAX_QUESTION_CHARS
    with pytest.raises(SluiceError, match=f"question must be at most {MAX_QUESTION_CHARS} characters") as caught:
        await library.search("docs", SearchQuery(question, None), SearchOptions())
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "question")
    await library.close()


async def test_a_search_is_a_span() -> None:
    encoder = GatedEncoder()
    library = DocumentLibrary(SqliteStore(None), lambda name: encoder, LibrarySettings())
    encoder.gate.set()
    await library.put("docs", upload("a", "Pumps", "Ferries"))
    with recorded() as recording:
        hits = await library.search("docs", SearchQuery("Pumps", None), SearchOptions(mode=RetrievalMode.BM25))
        with pytest.raises(SluiceError):
            await library.search("others", SearchQuery("Pumps", None), SearchOptions(mode=RetrievalMode.BM25))
    found, failed = recording.spans[1:]
    assert (found.name, failed.name) == ("retrieve", "retrieve")
    assert found.attributes == {
        "sluice.collection": "docs",
        "sluice.retrieval_mode": "bm25",
        "sluice.num_chunks": len(hits),
    }
    assert hits and not found.error and failed.error
    await library.close()


async def test_the_progress_of_encoding_is_known_while_a_document_is_put() -> None:
    encoder = GatedEncoder()
    library = DocumentLibrary(SqliteStore(None), lambda name: encoder, LibrarySettings())
    encoder.gate.set()
    await library.put("docs", upload("a", "Pumps", "Ferries"))
    assert await library.encoding_progress("docs") is None
    encoder.gate.clear()
    encoder.is_asked.clear()
    putting = asyncio.create_task(library.put("docs", upload("b", "Printers")))
    await encoder.is_asked.wait()
    assert await library.encoding_progress("docs") == EncodingProgress("docs", num_encoded=2, num_chunks=3)
    assert await library.encoding_progress("others") is None
    encoder.gate.set()
    await putting
    assert await library.encoding_progress("docs") is None
    await library.close()


async def test_a_put_that_fails_is_no_progress() -> None:
    library = DocumentLibrary(SqliteStore(None), lambda name: GatedEncoder(), LibrarySettings())
    with pytest.raises(SluiceError):
        await library.put("docs", Upload("a", b"\xff\xfe\xff", MARKDOWN))
    assert await library.encoding_progress("docs") is None
    await library.close()


@pytest.mark.parametrize("are_its_own", [True, False])
async def test_known_vectors_are_used_only_if_they_are_the_encoders_own(are_its_own: bool) -> None:
    encoder = GatedEncoder()
    encoder.gate.set()
    library = DocumentLibrary(SqliteStore(None), lambda name: encoder, LibrarySettings())
    await library.put("first", upload("a", "Pumps", "Ferries", "Printer"))
    texts, encoder.encoded = encoder.encoded, []
    assert len(texts) == 3
    known = {hash_text(text): direction_of(text) * (1 if are_its_own else -1) for text in texts}
    await library.put("second", upload("a", "Pumps", "Ferries", "Printer"), known=known)
    assert encoder.encoded == (texts[:1] if are_its_own else texts[:1] + texts)
    query = SearchQuery("", direction_of(texts[1]))
    for collection in ("first", "second"):
        (hit,) = await library.search(collection, query, SearchOptions(mode=RetrievalMode.VECTOR, top_k=1))
        assert hit.similarity == pytest.approx(1) and "Ferries" in hit.text
    await library.close()
