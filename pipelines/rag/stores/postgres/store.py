"""Collections in a Postgres database, which gateways share."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psycopg

from pipelines.rag.stores.base import Store
from pipelines.rag.stores.postgres import catalog, contents, failures, rows, schema, searching
from pipelines.rag.stores.postgres.address import parse_address
from pipelines.rag.stores.postgres.connections import ConnectionLimits, Connections, Session
from pipelines.rag.stores.postgres.rows import storable
from pipelines.rag.stores.postgres.searching import SearchTuning
from pipelines.rag.stores.postgres.trial import IndexTrials
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
from sluice.errors import invalid

T = TypeVar("T")

_MAX_ATTEMPTS = 3
"""Of a call that lost a race for locks, as against the deletion of its collection."""


class PostgresStore(Store):
    """Postgres 13 with pgvector 0.5, or newer. `address.parse_address` says what `url` is, and raises for it.

    Any number of stores, in any number of processes, may have the same database. Event loop's thread only.
    """

    def __init__(self, url: str, limits: ConnectionLimits | None = None, tuning: SearchTuning | None = None) -> None:
        self._address = parse_address(url)
        self._limits = limits or ConnectionLimits()
        self._tuning = tuning or SearchTuning()
        self._trials = IndexTrials(self._tuning.min_ef_search)
        self._connections = Connections(self._address, self._limits)
        self._preparing = asyncio.Lock()
        self._is_prepared = False
        self._last_failure = _Failure(-math.inf, "")
        self.name = self._address.name

    async def open(self) -> None:
        self._connections.open()
        await self._run(_nothing)

    async def close(self) -> None:
        await self._connections.close()

    # --- collections

    async def collections(self) -> list[CollectionInfo]:
        return await self._run(catalog.every)

    async def collection(self, name: str) -> CollectionInfo:
        async def work(session: Session) -> CollectionInfo:
            return (await catalog.find(session, name)).info

        return await self._run(work)

    async def create_collection(self, spec: CollectionSpec) -> CollectionInfo:
        return await self._run(lambda session: catalog.create(session, spec))

    async def delete_collection(self, name: str) -> None:
        await self._run(lambda session: catalog.delete(session, name))

    # --- documents

    async def put_document(
        self, collection: str, document: StoredDocument, chunks: Sequence[DocumentChunk], vectors: Vectors
    ) -> None:
        chunk_rows = await asyncio.to_thread(rows.chunk_rows, document, chunks)

        async def work(session: Session) -> None:
            async with session.transaction():
                found = await catalog.find_to_change(session, collection)
                _check_vectors(vectors, len(chunks), found.info.spec)
                removed = await contents.remove(session, found.id, storable(document.info.id))
                added = await contents.insert(session, found.id, document, chunk_rows, vectors)
                await contents.count(session, found.id, added, removed)

        await self._run(work)

    async def delete_document(self, collection: str, document_id: str) -> bool:
        async def work(session: Session) -> bool:
            async with session.transaction():
                found = await catalog.find_to_change(session, collection)
                removed = await contents.remove(session, found.id, storable(document_id))
                await contents.count(session, found.id, contents.NOTHING, removed)
                return removed != contents.NOTHING

        return await self._run(work)

    async def document(self, collection: str, document_id: str) -> StoredDocument | None:
        async def work(session: Session) -> StoredDocument | None:
            found = await catalog.find(session, collection)
            return await contents.document(session, found.id, storable(document_id))

        return await self._run(work)

    async def documents(self, collection: str, after: str = "", limit: int = 100) -> list[DocumentInfo]:
        async def work(session: Session) -> list[DocumentInfo]:
            found = await catalog.find(session, collection)
            return await contents.page(session, found.id, storable(after), limit)

        return await self._run(work)

    async def document_info(self, collection: str, document_id: str) -> DocumentInfo | None:
        async def work(session: Session) -> DocumentInfo | None:
            found = await catalog.find(session, collection)
            return await contents.info(session, found.id, storable(document_id))

        return await self._run(work)

    # --- searching

    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        async def work(session: Session) -> CandidateHits:
            async with session.snapshot():
                found = await catalog.find_to_search(session, collection)
                _check_query(query, found.info.spec)
                trial = self._trials.of(found.id, found.info)
                return await searching.candidates(session, found, query, trial, self._tuning.max_compared)

        return await self._run(work)

    # --- the server, and when it is not there

    async def _run(self, work: Callable[[Session], Awaitable[T]]) -> T:
        """Its answer; what it raises of psycopg comes out as UNAVAILABLE, unless it is a fault of ours."""
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return await self._tried(work)
            except failures.GONE:
                self._is_prepared = False
            except failures.LOST_RACES:
                continue
            except psycopg.Error as error:
                raise self._explained(error) from error
        try:
            return await self._tried(work)
        except psycopg.Error as error:
            raise self._explained(error) from error

    async def _tried(self, work: Callable[[Session], Awaitable[T]]) -> T:
        if not self._is_prepared:
            await self._prepare()
        async with self._connections.session() as session:
            return await work(session)

    def _explained(self, error: psycopg.Error) -> Exception:
        return failures.explained(error, self.name, self._limits.statement_timeout_s)

    async def _prepare(self) -> None:
        """Once, for all who wait for it: of a server that is down they all hear at once, not one after the other."""
        asked_s = time.monotonic()
        async with self._preparing:
            if self._is_prepared:
                return
            if self._last_failure.at_s >= asked_s:
                raise failures.unavailable(self.name, self._last_failure.reason)
            try:
                await self._prepare_now()
            except (psycopg.OperationalError, schema.SchemaError) as error:
                reason = failures.reason_of(error)
                self._last_failure = _Failure(time.monotonic(), reason)
                raise failures.unavailable(self.name, reason) from error

    async def _prepare_now(self) -> None:
        async with self._connections.new_session() as session:
            vector_oid = await schema.prepare(session, self._address.schema)
        await self._connections.send_vectors_by(rows.vector_dumper(vector_oid))
        self._is_prepared = True


@dataclass(frozen=True, slots=True)
class _Failure:
    at_s: float
    reason: str


async def _nothing(session: Session) -> None:
    await session.execute("SELECT 1")


def _check_vectors(vectors: Vectors, num_chunks: int, spec: CollectionSpec) -> None:
    if vectors.shape != (num_chunks, spec.dim):
        wanted = f"{num_chunks} vectors of length {spec.dim} for its {num_chunks} chunks"
        raise invalid("vectors", f"collection '{spec.name}' takes {wanted}, got the shape {list(vectors.shape)}")


def _check_query(query: CandidateQuery, spec: CollectionSpec) -> None:
    if query.vector is not None and query.vector.shape != (spec.dim,):
        given = f"the question's has the shape {list(query.vector.shape)}"
        raise invalid("vector", f"collection '{spec.name}' holds vectors of length {spec.dim}, {given}")
