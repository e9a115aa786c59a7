"""The interface of a store of collections."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sluice.pipelines.encoding import Vectors
from sluice.pipelines.rag.types import (
    CandidateHits,
    CandidateQuery,
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentInfo,
    StoredDocument,
)


class DocumentStore(ABC):
    """Keeps collections of documents, their chunks and vectors.

    Methods run on the event loop and never block it. A document is replaced or deleted in one transaction: a search
    sees all of its old chunks or all of its new ones. A change is on disk when the call returns. Every method raises
    SluiceError UNAVAILABLE, which names the store without its password, if the store cannot be reached or read now (it
    recovers by itself), and NOT_FOUND (param "collection") for a collection that does not exist.
    """

    name: str
    """The store's name in messages: `SQLite store /data/rag.sqlite`, `Postgres store db.example:5432/rag`."""

    is_shared = True
    """Whether other processes that open the same place find the same collections."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, and create or upgrade the schema. Idempotent."""

    @abstractmethod
    async def close(self) -> None:
        """Free connections and threads. Running calls end first, or fail. Idempotent."""

    @abstractmethod
    async def collections(self) -> list[CollectionInfo]:
        """Return all collections by name."""

    @abstractmethod
    async def collection(self, name: str) -> CollectionInfo:
        """Return the collection's info."""

    @abstractmethod
    async def create_collection(self, spec: CollectionSpec) -> CollectionInfo:
        """Create an empty collection. Raises ALREADY_EXISTS."""

    @abstractmethod
    async def delete_collection(self, name: str) -> None:
        """Delete the collection with all its documents."""

    @abstractmethod
    async def put_document(
        self, collection: str, document: StoredDocument, chunks: Sequence[DocumentChunk], vectors: Vectors
    ) -> None:
        """Add the document, or replace the one of its id. `vectors` has one row for each chunk.

        Raises INVALID if their length is not the collection's.
        """

    @abstractmethod
    async def delete_document(self, collection: str, document_id: str) -> bool:
        """Delete the document with its chunks. Returns whether it existed."""

    @abstractmethod
    async def document(self, collection: str, document_id: str) -> StoredDocument | None:
        """Return the document with its text, None if it does not exist."""

    @abstractmethod
    async def documents(self, collection: str, after: str = "", limit: int = 100) -> list[DocumentInfo]:
        """Return the first `limit` documents whose ids come after `after`, in order of id."""

    @abstractmethod
    async def document_info(self, collection: str, document_id: str) -> DocumentInfo | None:
        """Return the document without its text, None if it does not exist."""

    @abstractmethod
    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        """Search by vector and by words. Raises INVALID if the vector's length is not the collection's.

        `query.text` is what a user typed: operators in it have no meaning. Words match in chunk, heading and title.
        """
