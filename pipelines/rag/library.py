"""The server's collections: creates them, puts documents into them, and searches them."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from weakref import WeakValueDictionary

import numpy as np

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.reranker import ModelReranker
from sluice.pipelines.rag.chunker import ChunkOptions, chunk_document
from sluice.pipelines.rag.documents.parse import ParseLimits, parse_document
from sluice.pipelines.rag.search import SearchOptions, SearchQuery, check_question, search
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import (
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentInfo,
    Hit,
    RetrievalMode,
    StoredDocument,
    Upload,
    check_access,
    check_id,
    check_new_key,
    hash_content,
    hash_key,
)
from sluice.pipelines.text.citations import EncodingProgress
from sluice.record.spans import span

DEFAULT_COLLECTION = "docs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RESERVED_NAME = "collections"
"""No HTTP path could reach a collection of this name: `/v1/rag/collections` lists the collections."""
_RETRY_AFTER_S = 2.0
_CHUNKS_PER_ENCODE = 64
"""Chunks passed to the encoder at once: enough to fill its batches, few enough that searches get their turn between."""
_SAME_COSINE = 0.99
"""Least cosine of two vectors that one model made of one text, on any machine and in half precision."""

KnownVectors = Mapping[bytes, Vector]
"""Vectors computed in advance, by `hash_text` of the text that an encoder got."""


class PutStatus(StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Settings of the document library. `encoder` names the model of collections that are created without one.

    At most `num_parallel_puts` documents are changed at once. At most `max_waiting` changes, which hold their document
    in memory, wait for their turn.
    """

    encoder: str = "query_encoder"
    chunks: ChunkOptions = field(default_factory=ChunkOptions)
    parsing: ParseLimits = field(default_factory=ParseLimits)
    num_parallel_puts: int = 2
    max_waiting: int = 64


@dataclass(frozen=True, slots=True)
class PutResult:
    """The outcome of an upload."""

    status: PutStatus
    info: DocumentInfo


@dataclass(slots=True, eq=False)
class _Encoding:
    """A document that is being encoded."""

    num_chunks: int = 0
    num_encoded: int = 0


class DocumentLibrary:
    """Collections in one store, with the encoders of one repository. Used on the event loop's thread only.

    Every method raises SluiceError: NOT_FOUND if the collection does not exist, FORBIDDEN if `key` does not grant
    access to it, and UNAVAILABLE, which names the store or the encoder, if that is down.
    """

    def __init__(
        self, store: DocumentStore, find_encoder: Callable[[str], TextEncoder | LlmEncoder], settings: LibrarySettings
    ) -> None:
        self.settings = settings
        self._store = store
        self._find_encoder = find_encoder
        self._opening = asyncio.Lock()
        self._is_open = False
        self._open_failure: tuple[float, SluiceError] | None = None
        """The time and the reason of the last failed attempt to open the store."""
        self._puts = asyncio.Semaphore(settings.num_parallel_puts)
        self._num_waiting = 0
        self._document_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks of the documents being changed, by collection and id, so that the later of two uploads wins."""
        self._encodings: dict[str, list[_Encoding]] = {}
        """The documents being encoded, by collection. A collection without any is not in it."""

    async def close(self) -> None:
        await self._store.close()

    async def collections(self) -> list[CollectionInfo]:
        """Return all collections, protected ones too: names and sizes are not secret."""
        return await (await self._open_store()).collections()

    async def collection(self, name: str, key: str = "") -> CollectionInfo:
        """Return the collection's info. Raises NOT_FOUND and FORBIDDEN."""
        info = await (await self._open_store()).collection(name)
        check_access(info.spec, key)
        return info

    async def create_collection(self, name: str, encoder: str = "", key: str = "") -> CollectionInfo:
        """Create an empty collection, owned by `key` unless that is "". Raises INVALID and ALREADY_EXISTS."""
        check_collection_name(name)
        check_new_key(key)
        encoder = encoder or self.settings.encoder
        dim = await self._find_encoder(encoder).dim()
        hashes = (hash_key(key),) if key else ()
        return await (await self._open_store()).create_collection(CollectionSpec(name, encoder, dim, hashes))

    async def delete_collection(self, name: str, key: str = "") -> None:
        await self.collection(name, key)
        await self._store.delete_collection(name)

    @property
    def is_shared(self) -> bool:
        """Whether another process that opens the same store finds the same collections."""
        return self._store.is_shared

    @property
    def is_encoding(self) -> bool:
        """Whether this process is encoding documents."""
        return bool(self._encodings)

    async def encoding_progress(self, name: str) -> EncodingProgress | None:
        """Return how much of the collection is encoded, None unless this server is encoding documents of it."""
        encodings = self._encodings.get(name)
        if encodings is None:
            return None
        num_stored = (await self._store.collection(name)).num_chunks
        return EncodingProgress(
            collection=name,
            num_encoded=num_stored + sum(each.num_encoded for each in encodings),
            num_chunks=num_stored + sum(each.num_chunks for each in encodings),
        )

    async def put(
        self,
        collection: str,
        upload: Upload,
        key: str = "",
        *,
        force: bool = False,
        known: KnownVectors | None = None,
    ) -> PutResult:
        """Parse, chunk, encode and store the document, replacing any of its id. Creates a missing collection.

        A document with the same content, title and metadata stays as it is, unless `force` asks to chunk and encode it
        again, as after a change of settings or encoder. Chunks with a vector in `known` are not encoded, except one,
        which shows whether the vectors are this encoder's; if not, none is used. Raises INVALID and TOO_LARGE for
        documents that cannot be parsed.
        """
        check_id(upload.id)
        info = await self._find_or_create(collection, key)
        async with self._change(collection, upload.id):
            content_hash = await asyncio.to_thread(hash_content, upload)
            before = await self._store.document_info(collection, upload.id)
            if before is not None and before.content_hash == content_hash and not force:
                return PutResult(PutStatus.UNCHANGED, before)
            encoder = self._find_encoder(info.spec.encoder)
            with self._encoding(collection) as encoding:
                document, chunks = await self._parse(upload, encoder, content_hash)
                encoding.num_chunks = len(chunks)
                texts = [text_to_encode(document.info.title, chunk) for chunk in chunks]
                vectors = await self._encode(encoder, texts, encoding, known or {}, info.spec.dim)
                await self._store.put_document(collection, document, chunks, vectors)
            return PutResult(PutStatus.CREATED if before is None else PutStatus.UPDATED, document.info)

    async def delete_document(self, collection: str, document_id: str, key: str = "") -> bool:
        """Delete the document and return whether it existed. Searches that start afterwards do not find it."""
        await self.collection(collection, key)
        async with self._change(collection, document_id):
            return await self._store.delete_document(collection, document_id)

    async def document(self, collection: str, document_id: str, key: str = "") -> StoredDocument:
        """Return the document with its text. Raises NOT_FOUND."""
        await self.collection(collection, key)
        found = await self._store.document(collection, document_id)
        if found is None:
            message = f"collection '{collection}' has no document {document_id[:200]!r}"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="document")
        return found

    async def documents(self, collection: str, after: str = "", limit: int = 100, key: str = "") -> list[DocumentInfo]:
        """Return the first `limit` documents whose ids come after `after`, in order of id."""
        await self.collection(collection, key)
        return await self._store.documents(collection, after, limit)

    async def search(
        self,
        collection: str,
        query: SearchQuery,
        options: SearchOptions,
        reranker: ModelReranker | None = None,
        key: str = "",
    ) -> list[Hit]:
        """Return the best chunks. The collection's encoder supplies a vector that the search needs and `query` lacks.

        Raises INVALID for a question that is too long.
        """
        check_question(query.question)
        with span("retrieve", {"sluice.collection": collection, "sluice.retrieval_mode": options.mode.value}) as noted:
            info = await self.collection(collection, key)
            if query.vector is None and options.mode is not RetrievalMode.BM25:
                encoder = self._find_encoder(info.spec.encoder)
                query = replace(query, vector=await encoder.encode_query(query.question))
            hits = await search(self._store, collection, query, options, reranker)
            if noted is not None:
                noted.attributes["sluice.num_chunks"] = len(hits)
            return hits

    async def _find_or_create(self, name: str, key: str) -> CollectionInfo:
        with _suppress_code(ErrorCode.NOT_FOUND):
            return await self.collection(name, key)
        with _suppress_code(ErrorCode.ALREADY_EXISTS):  # another upload created it in the meantime
            return await self.create_collection(name, key=key)
        return await self.collection(name, key)

    @asynccontextmanager
    async def _change(self, collection: str, document_id: str) -> AsyncGenerator[None, None]:
        """Wait until this change may run: changes of one document in order of arrival, `num_parallel_puts` in all.

        Raises OVERLOADED if too many changes wait.
        """
        if self._num_waiting >= self.settings.max_waiting:
            message = f"{self._num_waiting} documents wait to be read; send this one again later"
            raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=_RETRY_AFTER_S)
        lock = self._document_locks.setdefault((collection, document_id), asyncio.Lock())
        async with AsyncExitStack() as locks:
            self._num_waiting += 1
            try:
                await locks.enter_async_context(lock)
                await locks.enter_async_context(self._puts)
            finally:
                self._num_waiting -= 1
            yield

    async def _parse(
        self, upload: Upload, encoder: TextEncoder | LlmEncoder, content_hash: str
    ) -> tuple[StoredDocument, list[DocumentChunk]]:
        parsed = await parse_document(upload.content, upload.format, self.settings.parsing, upload.encoding)
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

    @contextmanager
    def _encoding(self, collection: str) -> Iterator[_Encoding]:
        """Count a document as being encoded for the context's duration."""
        encoding = _Encoding()
        self._encodings.setdefault(collection, []).append(encoding)
        try:
            yield encoding
        finally:
            self._encodings[collection].remove(encoding)
            if not self._encodings[collection]:
                del self._encodings[collection]

    async def _encode(
        self, encoder: TextEncoder | LlmEncoder, texts: list[str], encoding: _Encoding, known: KnownVectors, dim: int
    ) -> Vectors:
        """Return one row for each text."""
        vectors = await _find_known(encoder, texts, known)
        missing = [row for row in range(len(texts)) if row not in vectors]
        encoding.num_encoded = len(vectors)
        for start in range(0, len(missing), _CHUNKS_PER_ENCODE):
            rows = missing[start : start + _CHUNKS_PER_ENCODE]
            vectors.update(zip(rows, await encoder.encode_documents([texts[row] for row in rows]), strict=True))
            encoding.num_encoded += len(rows)
        return np.stack([vectors[row] for row in range(len(texts))]) if texts else np.zeros((0, dim), np.float32)

    async def _open_store(self) -> DocumentStore:
        """Return the store, opened on first use: a server that is asked for no documents needs none."""
        if not self._is_open:
            called_s = time.monotonic()
            async with self._opening:
                await self._open(called_s)
        return self._store

    async def _open(self, called_s: float) -> None:
        """Open the store once for all waiting calls: if it is down, they fail together, not one after the other."""
        if self._is_open:
            return
        if self._open_failure is not None and self._open_failure[0] >= called_s:
            raise SluiceError(self._open_failure[1].code, self._open_failure[1].message)
        try:
            await self._store.open()
        except SluiceError as error:
            self._open_failure = time.monotonic(), error
            raise
        self._is_open = True


def check_collection_name(name: str) -> None:
    """Check a collection's name. Raises INVALID."""
    if not _NAME.fullmatch(name) or name == _RESERVED_NAME:
        allowed = "1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise invalid("collection", f"collection must be {allowed}, and not '{_RESERVED_NAME}', got {name[:80]!r}")


@contextmanager
def _suppress_code(code: ErrorCode) -> Iterator[None]:
    try:
        yield
    except SluiceError as error:
        if error.code is not code:
            raise


async def _find_known(encoder: TextEncoder | LlmEncoder, texts: list[str], known: KnownVectors) -> dict[int, Vector]:
    """Return the known vectors by the places of their texts; none if the first is not what the encoder makes of it."""
    if not known:
        return {}
    found = {row: known[digest] for row, text in enumerate(texts) if (digest := hash_text(text)) in known}
    if not found:
        return {}
    first = min(found)
    (vector,) = await encoder.encode_documents([texts[first]])
    is_same = vector.shape == found[first].shape and float(vector @ found[first]) >= _SAME_COSINE
    return found if is_same else {}


def hash_text(text: str) -> bytes:
    """Return the key of a text in `KnownVectors`."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def text_to_encode(title: str, chunk: DocumentChunk) -> str:
    """Return the text that stands for the chunk: under its title and headings, which tell its subject.

    A title that is also the first heading is left out.
    """
    is_repeated = not title or chunk.heading == title or chunk.heading.startswith(f"{title} > ")
    place = chunk.heading if is_repeated else " > ".join(part for part in (title, chunk.heading) if part)
    return f"{place}\n{chunk.text}" if place else chunk.text
