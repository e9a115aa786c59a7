"""Begins to put a document into the store at argv[1], says "half" in the middle of it, and waits to be killed."""

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import DocumentChunk
from tests.pipelines.rag.stores.corpus import document_of, unit_vectors

NUM_CHUNKS = 600
"""Chunks for three segments, so that the transaction has written to the file's log by its middle."""


class HalfSequence(Sequence[DocumentChunk]):
    """Blocks after the first half."""

    def __init__(self, chunks: list[DocumentChunk]) -> None:
        self._chunks = chunks

    @overload
    def __getitem__(self, index: int) -> DocumentChunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[DocumentChunk]: ...
    def __getitem__(self, index: int | slice) -> DocumentChunk | list[DocumentChunk]:
        return self._chunks[index]

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[DocumentChunk]:
        yield from self._chunks[: len(self) // 2]
        sys.stdout.write("half\n")
        sys.stdout.flush()
        threading.Event().wait()


async def main(path: str) -> None:
    store = SqliteStore(Path(path))
    await store.open()
    document, chunks = document_of("a", ["new text"] * NUM_CHUNKS, metadata={"version": "new"})
    await store.put_document("docs", document, HalfSequence(chunks), unit_vectors(NUM_CHUNKS, 1))


asyncio.run(main(sys.argv[1]))
