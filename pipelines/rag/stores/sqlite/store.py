"""Collections in one SQLite file."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from sluice.pipelines.encoding import Vectors
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.sqlite import documents, search
from sluice.pipelines.rag.stores.sqlite.schema import SCHEMA
from sluice.pipelines.rag.types import (
    CandidateHits,
    CandidateQuery,
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentInfo,
    StoredDocument,
)
from sluice.run_folder import make_folder
from sluice.state.connections import FileConnections, FileLimits


class SqliteStore(DocumentStore):
    """Searches a file exactly. Several processes may use the file at once; missing folders above it are created.

    One thread writes and a few read, so that searches do not wait for changes. Without `path`, the store has a
    temporary file that is deleted when it closes.
    """

    def __init__(self, path: Path | None, limits: FileLimits | None = None) -> None:
        self.name = f"SQLite store {path or ':memory:'}"
        self._folder = make_folder("rag") if path is None else None
        path = path or Path(self._folder or "", "rag.sqlite")
        self._connections = FileConnections(path.absolute(), self.name, SCHEMA, limits or FileLimits())

    async def open(self) -> None:
        self._connections.start()
        await self._connections.read(lambda connection: None)

    async def close(self) -> None:
        await self._connections.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def collections(self) -> list[CollectionInfo]:
        return await self._connections.read(documents.list_collections)

    async def collection(self, name: str) -> CollectionInfo:
        return await self._connections.read(documents.read_collection, name)

    async def create_collection(self, spec: CollectionSpec) -> CollectionInfo:
        return await self._connections.write(documents.create_collection, spec)

    async def delete_collection(self, name: str) -> None:
        await self._connections.write(documents.delete_collection, name)

    async def put_document(
        self, collection: str, document: StoredDocument, chunks: Sequence[DocumentChunk], vectors: Vectors
    ) -> None:
        await self._connections.write(documents.put_document, collection, document, chunks, vectors)

    async def delete_document(self, collection: str, document_id: str) -> bool:
        return await self._connections.write(documents.delete_document, collection, document_id)

    async def document(self, collection: str, document_id: str) -> StoredDocument | None:
        return await self._connections.read(documents.read_document, collection, document_id)

    async def documents(self, collection: str, after: str = "", limit: int = 100) -> list[DocumentInfo]:
        return await self._connections.read(documents.list_documents, collection, after, limit)

    async def document_info(self, collection: str, document_id: str) -> DocumentInfo | None:
        return await self._connections.read(documents.read_document_info, collection, document_id)

    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        return await self._connections.read(search.find_candidates, collection, query)
