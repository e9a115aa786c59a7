"""What a store of collections is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pipelines.rag.types import (
    CandidateHits,
    CandidateQuery,
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentInfo,
    StoredDocument,
    Vectors,
)


class Store(ABC):
    """Collections of documents, their chunks and vectors.

    Called on the event loop, and never blocks it. A document is replaced and deleted in one transaction: a search sees
    all of its old chunks or all of its new ones. What is done is on disk when the call returns. Every method raises
    SluiceError UNAVAILABLE, which names the store without its password, where the store cannot be reached or read now
    (and goes on by itself when it can be again), and NOT_FOUND (param "collection") for a collection that there is not.
    """

    name: str
    """What messages call it: `SQLite store /data/rag.sqlite`, `Postgres store db.example:5432/rag`."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, and make or upgrade what is missing of the schema. Idempotent."""

    @abstractmethod
    async def close(self) -> None:
        """Free connections and threads; calls under way end first, or in an error. Idempotent."""

    @abstractmethod
    async def collections(self) -> list[CollectionInfo]:
        """All, by name."""

    @abstractmethod
    async def collection(self, name: str) -> CollectionInfo:
        """That one."""

    @abstractmethod
    async def create_collection(self, spec: CollectionSpec) -> CollectionInfo:
        """Raises ALREADY_EXISTS."""

    @abstractmethod
    async def delete_collection(self, name: str) -> None:
        """With all that it holds."""

    @abstractmethod
    async def put_document(
        self, collection: str, document: StoredDocument, chunks: Sequence[DocumentChunk], vectors: Vectors
    ) -> None:
        """Add the document, or put it in the place of the one of its id. `vectors`: a row for each chunk.

        Raises INVALID where their length is not the collection's.
        """

    @abstractmethod
    async def delete_document(self, collection: str, document_id: str) -> bool:
        """Whether there was one."""

    @abstractmethod
    async def document(self, collection: str, document_id: str) -> StoredDocument | None:
        """The document with its text."""

    @abstractmethod
    async def documents(self, collection: str, after: str = "", limit: int = 100) -> list[DocumentInfo]:
        """At most `limit`, by id, those after the id `after`."""

    @abstractmethod
    async def document_info(self, collection: str, document_id: str) -> DocumentInfo | None:
        """The document without its text."""

    @abstractmethod
    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        """Search. Raises INVALID where the vector's length is not the collection's.

        `query.text` is what a user typed: no operator in it means anything. Words are looked for in chunk, heading
        and title.
        """
