"""Collections in a Postgres database, which gateways share."""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import psycopg

from sluice.errors import invalid
from sluice.pipelines.encoding import Vectors
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.postgres import rows, schema, search
from sluice.pipelines.rag.stores.postgres.rows import make_storable
from sluice.pipelines.rag.stores.postgres.search import IndexTrials, SearchTuning
from sluice.pipelines.rag.types import (
    CandidateHits,
    CandidateQuery,
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentInfo,
    StoredDocument,
)
from sluice.state.postgres import (
    GONE_ERRORS,
    LOST_RACE_ERRORS,
    ConnectionLimits,
    PostgresPool,
    PostgresSession,
    format_reason,
    parse_address,
    translate_error,
    unavailable,
)

T = TypeVar("T")
P = ParamSpec("P")

_MAX_ATTEMPTS = 3
"""Attempts of a call that loses a race for locks, such as against the deletion of its collection."""


class PostgresStore(DocumentStore):
    """A store in Postgres 13 or newer with pgvector 0.5 or newer. `connections.parse_address` parses `url`, and raises.

    Any number of stores, in any number of processes, may share a database. Used on the event loop's thread only.
    """

    def __init__(self, url: str, limits: ConnectionLimits | None = None, tuning: SearchTuning | None = None) -> None:
        self._address = parse_address(url)
        self._limits = limits or ConnectionLimits()
        self._tuning = tuning or SearchTuning()
        self._trials = IndexTrials(self._tuning.min_ef_search)
        self._pool = PostgresPool(self._address, self._limits)
        self._preparing = asyncio.Lock()
        self._is_prepared = False
        self._last_failure = (-math.inf, "")
        """The time and the reason of the last failed preparation."""
        self.name = self._address.name

    async def open(self) -> None:
        self._pool.open()
        await self._run(_ping)

    async def close(self) -> None:
        await self._pool.close()

    async def collections(self) -> list[CollectionInfo]:
        return await self._run(rows.list_collections)

    async def collection(self, name: str) -> CollectionInfo:
        return await self._run(rows.read_collection, name)

    async def create_collection(self, spec: CollectionSpec) -> CollectionInfo:
        return await self._run(rows.create_collection, spec)

    async def delete_collection(self, name: str) -> None:
        await self._run(rows.delete_collection, name)

    async def put_document(
        self, collection: str, document: StoredDocument, chunks: Sequence[DocumentChunk], vectors: Vectors
    ) -> None:
        chunk_rows = await asyncio.to_thread(rows.build_chunk_rows, document, chunks)

        async def work(session: PostgresSession) -> None:
            async with session.transaction():
                found = await rows.find_for_change(session, collection)
                _check_vectors(vectors, len(chunks), found.info.spec)
                removed = await rows.remove_document(session, found.id, make_storable(document.info.id))
                added = await rows.insert_document(session, found.id, document, chunk_rows, vectors)
                await rows.add_counts(session, found.id, added, removed)

        await self._run(work)

    async def delete_document(self, collection: str, document_id: str) -> bool:
        async def work(session: PostgresSession) -> bool:
            async with session.transaction():
                found = await rows.find_for_change(session, collection)
                removed = await rows.remove_document(session, found.id, make_storable(document_id))
                await rows.add_counts(session, found.id, rows.NO_COUNTS, removed)
                return removed != rows.NO_COUNTS

        return await self._run(work)

    async def document(self, collection: str, document_id: str) -> StoredDocument | None:
        return await self._run(rows.read_document, collection, document_id)

    async def documents(self, collection: str, after: str = "", limit: int = 100) -> list[DocumentInfo]:
        return await self._run(rows.list_documents, collection, after, limit)

    async def document_info(self, collection: str, document_id: str) -> DocumentInfo | None:
        return await self._run(rows.read_document_info, collection, document_id)

    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        async def work(session: PostgresSession) -> CandidateHits:
            async with session.snapshot():
                found = await rows.find_for_search(session, collection)
                _check_query(query, found.info.spec)
                trial = self._trials.find(found.id, found.info)
                return await search.find_candidates(session, found, query, trial, self._tuning.max_compared)

        return await self._run(work)

    async def _run(
        self, work: Callable[Concatenate[PostgresSession, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` on a session and return its result. Errors become UNAVAILABLE unless they are bugs of ours."""
        for attempt in itertools.count(1):
            try:
                if not self._is_prepared:
                    await self._prepare()
                async with self._pool.session() as session:
                    return await work(session, *args, **kwargs)
            except psycopg.Error as error:
                if attempt == _MAX_ATTEMPTS or not isinstance(error, GONE_ERRORS + LOST_RACE_ERRORS):
                    raise translate_error(error, self.name, self._limits.statement_timeout_s) from error
                if isinstance(error, GONE_ERRORS):
                    self._is_prepared = False
        raise AssertionError("the last attempt returns or raises")

    async def _prepare(self) -> None:
        """Prepare once for all waiting calls: if the server is down, they fail together, not one after the other."""
        called_s = time.monotonic()
        async with self._preparing:
            if self._is_prepared:
                return
            failed_s, reason = self._last_failure
            if failed_s >= called_s:
                raise unavailable(self.name, reason)
            try:
                await self._prepare_now()
            except (psycopg.OperationalError, schema.SchemaError) as error:
                reason = format_reason(error)
                self._last_failure = time.monotonic(), reason
                raise unavailable(self.name, reason) from error

    async def _prepare_now(self) -> None:
        async with self._pool.new_session() as session:
            vector_oid = await schema.prepare(session, self._address.schema)
        await self._pool.set_dumper(np.ndarray, rows.build_vector_dumper(vector_oid))
        self._is_prepared = True


async def _ping(session: PostgresSession) -> None:
    await session.execute("SELECT 1")


def _check_vectors(vectors: Vectors, num_chunks: int, spec: CollectionSpec) -> None:
    if vectors.shape != (num_chunks, spec.dim):
        expected = f"{num_chunks} vectors of length {spec.dim} for its {num_chunks} chunks"
        raise invalid("vectors", f"collection '{spec.name}' takes {expected}, got the shape {list(vectors.shape)}")


def _check_query(query: CandidateQuery, spec: CollectionSpec) -> None:
    if query.vector is not None and query.vector.shape != (spec.dim,):
        given = f"the question's has the shape {list(query.vector.shape)}"
        raise invalid("vector", f"collection '{spec.name}' holds vectors of length {spec.dim}, {given}")
