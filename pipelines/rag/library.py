"""The collections of one server: what puts documents into them, and what searches them."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from weakref import WeakValueDictionary

import numpy as np

from pipelines.rag import keys
from pipelines.rag.chunking.chunker import ChunkOptions, chunk_document
from pipelines.rag.documents.parse import ParseLimits, parse_document
from pipelines.rag.encoder import TextEncoder
from pipelines.rag.retrieval.search import Reranker, SearchOptions, SearchQuery, check_question, search
from pipelines.rag.stores.base import Store
from pipelines.rag.types import (
    Chunk,
    CollectionInfo,
    CollectionSpec,
    DocumentInfo,
    Hit,
    RetrievalMode,
    StoredDocument,
    Vectors,
)
from pipelines.rag.upload import Upload, check_id, content_hash_of
from sluice.errors import ErrorCode, SluiceError, invalid

DEFAULT_COLLECTION = "docs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RESERVED = "collections"
"""A word of the HTTP paths, which no path would reach as a collection."""
_RETRY_AFTER_S = 2.0
_ENCODER_BATCH = 64
"""Chunks that are made vectors of at once: enough to fill batches, few enough that searches get their turn between."""


class PutStatus(StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """`encoder` is the model that new collections are made with.

    `num_parallel_puts` documents are read at once, and `max_waiting` changes wait for that: each holds its document.
    """

    encoder: str = "query_encoder"
    chunks: ChunkOptions = field(default_factory=ChunkOptions)
    parsing: ParseLimits = field(default_factory=ParseLimits)
    num_parallel_puts: int = 2
    max_waiting: int = 64


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of an upload."""

    status: PutStatus
    info: DocumentInfo


class Library:
    """Collections over one store and the encoders of one repository. Event loop's thread only.

    Every method raises SluiceError: NOT_FOUND for a collection that there is not, FORBIDDEN where `key` does not open
    it, UNAVAILABLE, which names the store or the encoder, where that is down.
    """

    def __init__(self, store: Store, encoder_named: Callable[[str], TextEncoder], settings: LibrarySettings) -> None:
        self.settings = settings
        self._store = store
        self._encoder_named = encoder_named
        self._opening = asyncio.Lock()
        self._is_open = False
        self._open_failure: _OpenFailure | None = None
        self._puts = asyncio.Semaphore(settings.num_parallel_puts)
        self._num_waiting = 0
        self._documents: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Of documents that are being changed, so that of two uploads of one id the later wins."""

    async def _opened(self) -> Store:
        """The store, connected to when it is first wanted: a server that is asked for no documents needs none."""
        if not self._is_open:
            asked_s = time.monotonic()
            async with self._opening:
                await self._open(asked_s)
        return self._store

    async def _open(self, asked_s: float) -> None:
        """Once for all who wait: of a store that is down they all hear at once, not one after the other."""
        if self._is_open:
            return
        if self._open_failure is not None and self._open_failure.at_s >= asked_s:
            raise SluiceError(self._open_failure.error.code, self._open_failure.error.message)
        try:
            await self._store.open()
        except SluiceError as error:
            self._open_failure = _OpenFailure(time.monotonic(), error)
            raise
        self._is_open = True

    async def close(self) -> None:
        await self._store.close()

    # --- collections

    async def collections(self) -> list[CollectionInfo]:
        """All of them: their names and sizes are no secret."""
        return await (await self._opened()).collections()

    async def collection(self, name: str, key: str = "") -> CollectionInfo:
        """That one, for who may open it."""
        info = await (await self._opened()).collection(name)
        keys.check(info.spec, key)
        return info

    async def create_collection(self, name: str, encoder: str = "", key: str = "") -> CollectionInfo:
        """An empty one, owned by `key` where there is one. Raises INVALID for name and key, ALREADY_EXISTS."""
        check_name(name)
        keys.check_new(key)
        encoder = encoder or self.settings.encoder
        dim = await self._encoder_named(encoder).dim()
        hashes = (keys.hash_of(key),) if key else ()
        return await (await self._opened()).create_collection(CollectionSpec(name, encoder, dim, hashes))

    async def delete_collection(self, name: str, key: str = "") -> None:
        await self.collection(name, key)
        await self._store.delete_collection(name)

    # --- documents

    async def put(self, collection: str, upload: Upload, key: str = "", *, force: bool = False) -> PutResult:
        """Read, cut, encode and keep the document, in the place of the one of its id; makes the collection if need be.

        One that is there with the same bytes, title and metadata stays as it is, unless `force`: then it is cut and
        encoded anew, as other settings or another encoder want it. Raises INVALID and TOO_LARGE for
        documents that cannot be read.
        """
        check_id(upload.id)
        info = await self._collection_for_put(collection, key)
        async with self._turn(collection, upload.id):
            content_hash = await asyncio.to_thread(content_hash_of, upload)
            before = await self._store.document_info(collection, upload.id)
            if before is not None and before.content_hash == content_hash and not force:
                return PutResult(PutStatus.UNCHANGED, before)
            encoder = self._encoder_named(info.spec.encoder)
            document, chunks = await self._read(upload, encoder, content_hash)
            vectors = await self._encoded(encoder, document, chunks, info.spec.dim)
            await self._store.put_document(collection, document, chunks, vectors)
            return PutResult(PutStatus.CREATED if before is None else PutStatus.UPDATED, document.info)

    async def delete_document(self, collection: str, document_id: str, key: str = "") -> bool:
        """Whether there was one. No answer rests on it from now on."""
        await self.collection(collection, key)
        async with self._turn(collection, document_id):
            return await self._store.delete_document(collection, document_id)

    async def document(self, collection: str, document_id: str, key: str = "") -> StoredDocument:
        """Raises NOT_FOUND."""
        await self.collection(collection, key)
        found = await self._store.document(collection, document_id)
        if found is None:
            message = f"collection '{collection}' has no document {document_id[:200]!r}"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="document")
        return found

    async def documents(self, collection: str, after: str = "", limit: int = 100, key: str = "") -> list[DocumentInfo]:
        """At most `limit`, by id, those after the id `after`."""
        await self.collection(collection, key)
        return await self._store.documents(collection, after, limit)

    # --- searching

    async def search(
        self,
        collection: str,
        query: SearchQuery,
        options: SearchOptions,
        reranker: Reranker | None = None,
        key: str = "",
    ) -> list[Hit]:
        """The best chunks. A vector that the search needs and `query` lacks is made by the collection's encoder.

        Raises INVALID for a question that is too long.
        """
        check_question(query.question)
        info = await self.collection(collection, key)
        if query.vector is None and options.mode is not RetrievalMode.BM25:
            query = replace(query, vector=await self._encoder_named(info.spec.encoder).encode_query(query.question))
        return await search(self._store, collection, query, options, reranker)

    # --- how a document is put

    async def _collection_for_put(self, name: str, key: str) -> CollectionInfo:
        with suppress_code(ErrorCode.NOT_FOUND):
            return await self.collection(name, key)
        with suppress_code(ErrorCode.ALREADY_EXISTS):  # where somebody else was faster
            return await self.create_collection(name, key=key)
        return await self.collection(name, key)

    @asynccontextmanager
    async def _turn(self, collection: str, document_id: str) -> AsyncGenerator[None, None]:
        """One change of a document at a time, in the order in which they came, and few documents at all.

        Raises OVERLOADED where too many wait for that.
        """
        if self._num_waiting >= self.settings.max_waiting:
            message = f"{self._num_waiting} documents wait to be read; send this one again later"
            raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=_RETRY_AFTER_S)
        lock = self._documents.setdefault((collection, document_id), asyncio.Lock())
        async with AsyncExitStack() as held:
            self._num_waiting += 1
            try:
                await held.enter_async_context(lock)
                await held.enter_async_context(self._puts)
            finally:
                self._num_waiting -= 1
            yield

    async def _read(
        self, upload: Upload, encoder: TextEncoder, content_hash: str
    ) -> tuple[StoredDocument, list[Chunk]]:
        parsed = await parse_document(upload.content, upload.format, self.settings.parsing)
        starts = await encoder.token_starts(parsed.text)
        chunks = await asyncio.to_thread(chunk_document, parsed, starts, self.settings.chunks)
        info = DocumentInfo(
            id=upload.id,
            title=upload.title or parsed.title or upload.id,
            format=upload.format,
            content_hash=content_hash,
            num_chars=len(parsed.text),
            num_chunks=len(chunks),
            metadata=upload.metadata,
            updated_s=time.time(),
        )
        return StoredDocument(info, parsed.text), chunks

    async def _encoded(self, encoder: TextEncoder, document: StoredDocument, chunks: list[Chunk], dim: int) -> Vectors:
        """A row for each chunk. Encoded is the chunk under its title and headings: they say what it is about."""
        texts = [_with_place(document.info.title, chunk) for chunk in chunks]
        parts = [
            await encoder.encode_documents(texts[start : start + _ENCODER_BATCH])
            for start in range(0, len(texts), _ENCODER_BATCH)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, dim), np.float32)


@dataclass(frozen=True, slots=True)
class _OpenFailure:
    """When and why the store could not be opened last."""

    at_s: float
    error: SluiceError


@contextmanager
def suppress_code(code: ErrorCode) -> Iterator[None]:
    """Go on after an error of that code."""
    try:
        yield
    except SluiceError as error:
        if error.code is not code:
            raise


def _with_place(title: str, chunk: Chunk) -> str:
    """A title that is the first heading too is said once."""
    is_told = not title or chunk.heading == title or chunk.heading.startswith(f"{title} > ")
    place = chunk.heading if is_told else " > ".join(part for part in (title, chunk.heading) if part)
    return f"{place}\n{chunk.text}" if place else chunk.text


def check_name(collection: str) -> None:
    """Raises INVALID for what no collection can be called."""
    if not _NAME.fullmatch(collection) or collection == _RESERVED:
        allowed = "1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise invalid("collection", f"collection must be {allowed}, and not '{_RESERVED}', got {collection[:80]!r}")
