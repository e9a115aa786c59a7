"""Behaviour of a library in front of its store."""

import asyncio
from pathlib import Path

import pytest

from pipelines.rag.encoder import TextEncoder
from pipelines.rag.library import DocumentLibrary, LibrarySettings
from pipelines.rag.retrieval.search import MAX_QUESTION_CHARS, SearchOptions, SearchQuery
from pipelines.rag.stores.sqlite.store import SqliteStore
from pipelines.rag.types import CollectionSpec
from sluice.errors import ErrorCode, SluiceError


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
