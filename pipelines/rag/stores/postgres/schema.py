"""The tables of a store, created by whichever gateway comes first.

Each collection has three tables of its own, named by its id: its indexes are no larger than itself, its vectors have
one length, and deleting it is fast. Vectors stand apart from text, so that comparing all of them reads nothing else.
"""

from typing import Any

from psycopg import errors, sql

from sluice.state.postgres import PostgresSession

MAX_INDEXED_DIM = 2000
"""pgvector's HNSW takes no longer vectors; collections with longer ones are compared one by one."""
HNSW_M = 16
HNSW_EF_CONSTRUCTION = 64
VERSION = 1

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('sluice_rag schema', 0))"
_CREATE = """
CREATE TABLE sluice_rag_schema (version int NOT NULL);
CREATE TABLE sluice_rag_collections (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    encoder text NOT NULL,
    dim int NOT NULL,
    key_hashes text[] NOT NULL,
    num_documents bigint NOT NULL DEFAULT 0,
    num_chunks bigint NOT NULL DEFAULT 0,
    num_terms bigint NOT NULL DEFAULT 0,
    created_s double precision NOT NULL
);
"""
_COLLECTION = """
CREATE TABLE sluice_rag_documents_{id} (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text COLLATE "C" NOT NULL UNIQUE,
    title text NOT NULL,
    format text NOT NULL,
    content_hash text NOT NULL,
    num_chars int NOT NULL,
    num_chunks int NOT NULL,
    num_terms int NOT NULL,
    metadata jsonb NOT NULL,
    updated_s double precision NOT NULL,
    text text NOT NULL
);
CREATE TABLE sluice_rag_chunks_{id} (
    document bigint NOT NULL REFERENCES sluice_rag_documents_{id} ON DELETE CASCADE,
    index int NOT NULL,
    heading text NOT NULL,
    start_char int NOT NULL,
    end_char int NOT NULL,
    text text NOT NULL,
    num_terms int NOT NULL,
    terms tsvector NOT NULL,
    PRIMARY KEY (document, index)
);
ALTER TABLE sluice_rag_chunks_{id} ALTER COLUMN terms SET STORAGE MAIN;
-- Without a list of pending entries: every search would read it from end to end.
CREATE INDEX ON sluice_rag_chunks_{id} USING gin (terms) WITH (fastupdate = off);
CREATE TABLE sluice_rag_vectors_{id} (
    document bigint NOT NULL REFERENCES sluice_rag_documents_{id} ON DELETE CASCADE,
    index int NOT NULL,
    embedding vector({dim}) NOT NULL,
    PRIMARY KEY (document, index)
);
ALTER TABLE sluice_rag_vectors_{id} ALTER COLUMN embedding SET STORAGE {storage};
"""
_VECTOR_INDEX = """
CREATE INDEX ON sluice_rag_vectors_{id} USING hnsw (embedding vector_ip_ops) WITH (m = {m}, ef_construction = {ef});
"""


class SchemaError(Exception):
    """Raised with the reason why this database cannot be used, and the remedy."""


def collection_tables(id: int, dim: int) -> str:
    """Return the statements that create a collection's tables.

    Vectors have length 1, so their inner product is the cosine, and cheaper to compute.
    """
    is_indexed = dim <= MAX_INDEXED_DIM
    tables = _COLLECTION.format(id=id, dim=dim, storage="PLAIN" if is_indexed else "EXTERNAL")
    return tables + (_VECTOR_INDEX.format(id=id, m=HNSW_M, ef=HNSW_EF_CONSTRUCTION) if is_indexed else "")


def dropped_tables(id: int) -> str:
    return "; ".join(f"DROP TABLE sluice_rag_{kind}_{id}" for kind in ("vectors", "chunks", "documents"))


async def prepare(session: PostgresSession, schema: str) -> int:
    """Create missing tables, and `schema` unless it is "". Returns the OID of the type vector.

    Raises SchemaError and psycopg.Error.
    """
    async with session.transaction():
        await session.execute(_LOCK)
        if schema and not await _select_value(session, "SELECT to_regnamespace(quote_ident(%s)) IS NOT NULL", schema):
            await session.execute(f"CREATE SCHEMA {sql.Identifier(schema).as_string()}")
        if not await _select_value(session, "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'vector')"):
            await _create_extension(session)
        if not await _select_value(session, "SELECT to_regclass('sluice_rag_schema') IS NOT NULL"):
            await session.execute(_CREATE)
            await session.execute("INSERT INTO sluice_rag_schema VALUES (%s)", [VERSION])
        await _check_version(session)
        return int(await _select_value(session, "SELECT 'vector'::regtype::oid::bigint"))


async def _check_version(session: PostgresSession) -> None:
    version = await _select_value(session, "SELECT max(version) FROM sluice_rag_schema")
    if version != VERSION:
        raise SchemaError(f"it has tables of version {version}, and this Sluice knows version {VERSION}")


async def _create_extension(session: PostgresSession) -> None:
    try:
        await session.execute("CREATE EXTENSION vector SCHEMA public")
    except errors.InsufficientPrivilege as error:
        advice = "as a superuser, run CREATE EXTENSION vector in this database"
        raise SchemaError(f"it lacks pgvector, which this role may not create: {advice}") from error
    except (errors.UndefinedFile, errors.FeatureNotSupported) as error:
        advice = "install it on the server (package postgresql-NN-pgvector, image pgvector/pgvector)"
        raise SchemaError(f"it lacks pgvector: {advice}, then run CREATE EXTENSION vector in this database") from error


async def _select_value(session: PostgresSession, query: str, *parameters: str) -> Any:
    row = await (await session.execute(query, parameters)).fetchone()
    return row and row[0]
