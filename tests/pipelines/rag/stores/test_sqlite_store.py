"""The SQLite store's file: other processes, kill -9, failures and recovery."""

import asyncio
import os
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.filters import Operator
from sluice.pipelines.rag.stores.sqlite import indexes, schema
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import CollectionSpec
from sluice.state.connections import FileLimits
from tests.paths import ROOT
from tests.pipelines.rag.stores.corpus import DIM, SPEC, document_of, ids, matching, nearest, put, unit_vectors, where
from tests.waiting import PATIENCE_S

HALF_A_PUT = Path(__file__).with_name("half_a_put.py")
IMPATIENT = FileLimits(busy_timeout_s=0.05)


@asynccontextmanager
async def opened(path: Path | None, limits: FileLimits | None = None) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, limits)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def filled(path: Path) -> None:
    """A store with the document "a" in "docs"."""
    async with opened(path) as store:
        await store.create_collection(SPEC)
        await put(store, "a", ["old text"] * 3, metadata={"version": "old"})


async def unusable(store: SqliteStore, says: str) -> None:
    """Check that reading fails with the store's name and `says`."""
    with pytest.raises(SluiceError, match=says) as caught:
        await store.collections()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert store.name in caught.value.message


# --- what stays


async def test_documents_are_their_owners(tmp_path: Path) -> None:
    async with opened(tmp_path / "rag.sqlite") as store:
        await store.create_collection(SPEC)
        rights = {name: os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)}
        assert rights == dict.fromkeys(("rag.sqlite", "rag.sqlite-shm", "rag.sqlite-wal"), 0o600)


async def test_a_store_in_memory_is_gone_when_it_closes() -> None:
    async with opened(None) as one, opened(None) as other:
        await one.create_collection(SPEC)
        assert await other.collections() == []
        await asyncio.gather(*(put(one, f"d{index}", ["text"]) for index in range(8)))
        assert len(await matching(one, "text")) == 8
        assert ":memory:" in one.name
        await one.close()
        await one.open()
        assert await one.collections() == []


async def test_vectors_are_kept_to_the_bit(tmp_path: Path) -> None:
    rows = unit_vectors(700, 5, 33)
    async with opened(tmp_path / "rag.sqlite") as store:
        await store.create_collection(CollectionSpec("docs", "encoder", 33))
        await put(store, "a", [f"text {index}" for index in range(700)], vectors=rows)
        hits = await nearest(store, rows[0], limit=700, with_vectors=True)
    kept = np.stack([hit.vector for hit in sorted(hits, key=lambda hit: hit.chunk_index) if hit.vector is not None])
    assert kept.tobytes() == rows.tobytes()


async def test_places_of_deleted_documents_are_used_again(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    async with opened(path) as store:
        await store.create_collection(SPEC)
        for index in range(30):
            await put(store, f"d{index:02}", ["text"] * 20, metadata={"number": index})
        num_segments = _count(path, "segments")
        for index in range(0, 30, 2):
            await put(store, f"d{index:02}", ["text"] * 20)
        assert _count(path, "segments") == num_segments == -(-600 // indexes.SLOTS)
        for index in range(30):
            await store.delete_document("docs", f"d{index:02}")
    for table in ("segments", "segment_vectors", "chunks", "documents", "attributes"):
        assert _count(path, table) == 0, table


async def test_a_deleted_collection_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    await filled(path)
    async with opened(path) as store:
        await store.delete_collection("docs")
    for table in ("segments", "segment_vectors", "chunks", "documents", "attributes", "collections"):
        assert _count(path, table) == 0, table
    with apsw.Connection(str(path)) as connection:
        query = "SELECT count(*) FROM sqlite_schema WHERE name LIKE 'words%' OR name LIKE 'terms%'"
        assert connection.execute(query).get == 0


def _count(path: Path, table: str) -> int:
    connection = apsw.Connection(str(path))
    try:
        return int(str(connection.execute(f"SELECT count(*) FROM {table}").get))
    finally:
        connection.close()


async def test_in_a_large_collection_words_of_every_chunk_take_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequent words are used if a question has no others."""
    monkeypatch.setattr(indexes, "_MANY_CHUNKS", 8)
    async with opened(tmp_path / "rag.sqlite") as store:
        await store.create_collection(SPEC)
        for index in range(9):
            await put(store, f"d{index}", ["streaming everywhere" if index else "streams with okapis"])
        assert ids(await matching(store, "streamed okapi")) == ["d0"]
        assert ids(await matching(store, "streamed-okapi")) == ["d0"]
        assert len(await matching(store, "streamed")) == 9


# --- other processes


@pytest.mark.slow
async def test_killed_in_the_middle_of_a_put_the_old_document_stays(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    await filled(path)
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(HALF_A_PUT), str(path), stdout=PIPE, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"half\n"
        async with opened(path) as store:  # what is half done is seen by nobody
            assert ids(await matching(store, "old new")) == ["a", "a", "a"]
    finally:
        child.kill()
        await child.wait()
    async with opened(path) as store:
        document = await store.document("docs", "a")
        assert document is not None
        assert document.text == "old text\nold text\nold text"
        assert ids(await matching(store, "text", limit=50)) == ["a"] * 3
        assert len(await nearest(store, unit_vectors(1, 0)[0], limit=50)) == 3
        assert (await store.collection("docs")).num_chunks == 3
        assert not await matching(store, "text", filter=where("version", Operator.EQ, "new"))
        await put(store, "a", ["newer text"])
        assert ids(await matching(store, "text", limit=50)) == ["a"]
    assert _integrity(path) == "ok"


def _integrity(path: Path) -> str:
    connection = apsw.Connection(str(path))
    try:
        return str(connection.execute("PRAGMA integrity_check").get)
    finally:
        connection.close()


async def test_a_lock_that_is_never_released_is_an_error_and_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    await filled(path)
    async with opened(path, IMPATIENT) as store:
        holder = apsw.Connection(str(path))
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(SluiceError, match=r"locked for more than 0.05 s") as caught:
            await put(store, "b", ["text"])
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert ids(await matching(store, "old")) == ["a"] * 3  # a search waits for no writer
        holder.execute("ROLLBACK")
        holder.close()
        await put(store, "b", ["text"])
        assert len(await matching(store, "text")) == 4


# --- what makes it unusable


async def test_another_file_than_a_database_is_refused_until_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    store = SqliteStore(path)
    with pytest.raises(SluiceError, match="not a database") as caught:
        await store.open()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    await unusable(store, "not a database")
    path.unlink()
    assert await store.collections() == []
    await store.close()


async def test_a_damaged_file_is_an_error_that_names_the_store(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    async with opened(path) as store:
        await store.create_collection(SPEC)
        for index in range(40):
            await put(store, f"d{index}", ["text " * 400] * 4)
    content = path.read_bytes()
    path.write_bytes(content[:16384] + b"damage! " * ((len(content) - 16384) // 8))
    async with opened(path) as store:
        with pytest.raises(SluiceError, match="malformed") as caught:
            await matching(store, "text")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert store.name in caught.value.message


async def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "rag.sqlite", tmp_path / "other.sqlite"
    await filled(path)
    async with opened(other) as store:
        await store.create_collection(CollectionSpec("elsewhere", "encoder", DIM))
    async with opened(path) as store:
        assert [info.spec.name for info in await store.collections()] == ["docs"]
        other.rename(path)
        assert [info.spec.name for info in await store.collections()] == ["elsewhere"]
        await store.create_collection(SPEC)


@pytest.mark.parametrize("place", ["file/rag.sqlite", "folder"])
async def test_a_place_that_cannot_be_a_file_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    (tmp_path / "folder").mkdir()
    store = SqliteStore(tmp_path / place)
    with pytest.raises(SluiceError, match=rf"{place} cannot be used") as caught:
        await store.open()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    await store.close()


async def test_a_full_disk_is_an_error_and_the_old_document_stays(tmp_path: Path) -> None:
    """A page limit, which SQLite reports like a full disk."""
    path = tmp_path / "rag.sqlite"
    await filled(path)
    async with opened(path) as store:
        await store._connections.write(lambda connection: connection.pragma("max_page_count", 1))
        with pytest.raises(SluiceError, match="full") as caught:
            await put(store, "a", ["long text " * 1000] * 500)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert len(await matching(store, "old")) == 3
        await put(store, "a", ["new text"])
        assert ids(await matching(store, "new")) == ["a"]


async def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    await filled(path)
    connection = apsw.Connection(str(path))
    newest = len(schema.SCHEMA.steps)
    connection.pragma("user_version", newest + 1)
    connection.close()
    store = SqliteStore(path)
    with pytest.raises(SluiceError, match=f"version is {newest + 1} .* up to {newest}"):
        await store.open()
    await store.close()


async def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE theirs (id INTEGER)")
    store = SqliteStore(path)
    with pytest.raises(SluiceError, match="another program's database"):
        await store.open()
    await store.close()
    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]
    connection.close()


# --- threads


async def test_a_long_read_does_not_keep_writes_or_other_reads_waiting(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    await filled(path)
    release = threading.Event()
    async with opened(path) as store:
        held = asyncio.create_task(store._connections.read(lambda connection: release.wait(60)))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await put(store, "b", ["old"])
                assert len(await matching(store, "old")) == 4
        finally:
            release.set()
        assert await held


async def test_a_cancelled_read_stops_in_sqlite(tmp_path: Path) -> None:
    """A cancelled query that would take minutes releases the only thread."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1e10) SELECT count(*) FROM n"
    running = threading.Event()

    def count(connection: apsw.Connection) -> object:
        running.set()
        return connection.execute(endless).get

    async with opened(tmp_path / "rag.sqlite", FileLimits(num_readers=1)) as store:
        read = asyncio.create_task(store._connections.read(count))
        await asyncio.to_thread(running.wait, 30)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        async with asyncio.timeout(PATIENCE_S):
            assert await store.collections() == []


async def test_close_lets_what_runs_end(tmp_path: Path) -> None:
    path = tmp_path / "rag.sqlite"
    store = SqliteStore(path)
    await store.open()
    await store.create_collection(SPEC)
    document, chunks = document_of("a", ["text"])
    puts = [asyncio.create_task(store.put_document("docs", document, chunks, unit_vectors(1, 0))) for _ in range(4)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*puts)
    async with opened(path) as again:
        assert await again.document("docs", "a") == document
