"""The collections that there are."""

import time
from dataclasses import dataclass

from pipelines.rag.stores.postgres import schema
from pipelines.rag.stores.postgres.connections import Session
from pipelines.rag.stores.postgres.rows import storable
from pipelines.rag.types import CollectionInfo, CollectionSpec
from sluice.errors import ErrorCode, SluiceError

_COLUMNS = "id, name, encoder, dim, key_hashes, num_documents, num_chunks, num_terms, created_s"
_NUM_COLUMNS = 9
_SELECT = f"SELECT {_COLUMNS} FROM sluice_rag_collections"
_INSERT = f"""
INSERT INTO sluice_rag_collections (name, encoder, dim, key_hashes, created_s) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (name) DO NOTHING RETURNING {_COLUMNS}
"""

_SEARCH_LOCK = "hashtextextended('sluice_rag search', id)"
"""Of all tables of a collection. Without it a search and a deletion, which lock several, could wait for each other."""


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """`id` names its tables; `num_terms` is of all its chunks."""

    id: int
    num_terms: int
    info: CollectionInfo


async def every(session: Session) -> list[CollectionInfo]:
    """By name."""
    found = await (await session.execute(f"{_SELECT} ORDER BY name")).fetchall()
    return [_row_of(*row).info for row in found]


async def find(session: Session, name: str) -> CollectionRow:
    """Raises NOT_FOUND."""
    return await _find(session, name, f"{_SELECT} WHERE name = %s")


async def find_to_search(session: Session, name: str) -> CollectionRow:
    """One that stays until the transaction ends. Raises NOT_FOUND."""
    lock = f"pg_advisory_xact_lock_shared({_SEARCH_LOCK})"
    return await _find(session, name, f"SELECT {_COLUMNS}, {lock} FROM sluice_rag_collections WHERE name = %s")


async def find_to_change(session: Session, name: str) -> CollectionRow:
    """One that stays until the transaction ends, in which others may change other documents. Raises NOT_FOUND."""
    return await _find(session, name, f"{_SELECT} WHERE name = %s FOR KEY SHARE")


async def _find(session: Session, name: str, statement: str) -> CollectionRow:
    row = await (await session.execute(statement, [storable(name)])).fetchone()
    if row is None:
        raise SluiceError(ErrorCode.NOT_FOUND, f"there is no collection '{name}'", param="collection")
    return _row_of(*row[:_NUM_COLUMNS])


async def create(session: Session, spec: CollectionSpec) -> CollectionInfo:
    """With its tables. Raises ALREADY_EXISTS."""
    given = [storable(spec.name), storable(spec.encoder), spec.dim, list(spec.key_hashes), time.time()]
    async with session.transaction():
        row = await (await session.execute(_INSERT, given)).fetchone()
        if row is None:
            message = f"there is a collection '{spec.name}' already"
            raise SluiceError(ErrorCode.ALREADY_EXISTS, message, param="collection")
        made = _row_of(*row)
        await session.execute(schema.collection_tables(made.id, spec.dim))
    return made.info


async def delete(session: Session, name: str) -> None:
    """With its tables, once nobody is changing or searching it. Raises NOT_FOUND."""
    async with session.transaction():
        found = await _find(session, name, f"{_SELECT} WHERE name = %s FOR UPDATE")
        await session.execute(
            f"SELECT pg_advisory_xact_lock({_SEARCH_LOCK}) FROM (VALUES (%s::bigint)) v (id)", [found.id]
        )
        await session.execute(schema.dropped_tables(found.id))
        await session.execute("DELETE FROM sluice_rag_collections WHERE id = %s", [found.id])


def _row_of(
    id: int,
    name: str,
    encoder: str,
    dim: int,
    key_hashes: list[str],
    num_documents: int,
    num_chunks: int,
    num_terms: int,
    created_s: float,
) -> CollectionRow:
    spec = CollectionSpec(name, encoder, dim, tuple(key_hashes))
    return CollectionRow(id, num_terms, CollectionInfo(spec, num_documents, num_chunks, created_s))
