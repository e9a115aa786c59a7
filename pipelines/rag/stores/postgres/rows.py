"""Values as rows, and rows as values."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from psycopg.adapt import Dumper
from psycopg.pq import Format

from pipelines.rag.stores.postgres.terms import Terms, terms_of
from pipelines.rag.types import DocumentChunk, DocumentFormat, DocumentInfo, Hit, Metadata, StoredDocument, Vector

INFO_COLUMNS = "id, title, format, content_hash, num_chars, num_chunks, metadata, updated_s"
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_BYTES_BEFORE_ELEMENTS = 4


class VectorDumper(Dumper):
    """A float32 array as pgvector sends and takes it: two 16-bit numbers, length and 0, then the elements."""

    format = Format.BINARY

    def dump(self, obj: Vector) -> bytes:
        return np.array([obj.size, 0], ">i2").tobytes() + obj.astype(">f4").tobytes()


def vector_dumper(oid: int) -> type[VectorDumper]:
    """For a database in which the type vector has that number."""
    return type("VectorDumper", (VectorDumper,), {"oid": oid})


def vector_of(sent: bytes) -> Vector:
    """Of what `vector_send` gives."""
    return np.frombuffer(sent, ">f4", offset=_BYTES_BEFORE_ELEMENTS).astype(np.float32)


def storable(text: str) -> str:
    """As long as before. Postgres has no character 0, UTF-8 no half surrogates."""
    return _UNSTORABLE.sub("\ufffd", text)


def document_info(row: Sequence[Any]) -> DocumentInfo:
    """Of INFO_COLUMNS."""
    document_id, title, format, content_hash, num_chars, num_chunks, metadata, updated_s = row
    return DocumentInfo(
        id=document_id,
        title=title,
        format=DocumentFormat(format),
        content_hash=content_hash,
        num_chars=num_chars,
        num_chunks=num_chunks,
        metadata=metadata,
        updated_s=updated_s,
    )


def document_row(document: StoredDocument, num_chunks: int, num_terms: int) -> dict[str, Any]:
    info = document.info
    return {
        "id": storable(info.id),
        "title": storable(info.title),
        "format": info.format.value,
        "content_hash": info.content_hash,
        "num_chars": info.num_chars,
        "num_chunks": num_chunks,
        "num_terms": num_terms,
        "metadata": _metadata_json(info.metadata),
        "updated_s": info.updated_s,
        "text": storable(document.text),
    }


def chunk_rows(document: StoredDocument, chunks: Sequence[DocumentChunk]) -> list[dict[str, Any]]:
    """One for each chunk, but for the document's key. What title, heading and text are found by stands apart."""
    title = terms_of(document.info.title)
    return [_chunk_row(chunk, title) for chunk in chunks]


def _chunk_row(chunk: DocumentChunk, title: Terms) -> dict[str, Any]:
    heading, text = terms_of(chunk.heading), terms_of(chunk.text)
    return {
        "index": chunk.index,
        "heading": storable(chunk.heading),
        "start": chunk.start,
        "end": chunk.end,
        "text": storable(chunk.text),
        "num_terms": len(title.words) + len(heading.words) + len(text.words),
        "title_words": title.prose,
        "title_names": title.tsvector,
        "heading_words": heading.prose,
        "heading_names": heading.tsvector,
        "text_words": text.prose,
        "text_names": text.tsvector,
    }


def hit(row: Sequence[Any]) -> Hit:
    """Of what `searching` selects of a chunk. Its score is its similarity."""
    document_id, index, title, heading, start, end, text, metadata, similarity, sent = row
    return Hit(
        document_id=document_id,
        chunk_index=index,
        title=title,
        heading=heading,
        start=start,
        end=end,
        text=text,
        score=similarity or 0.0,
        metadata=metadata,
        similarity=similarity,
        vector=None if sent is None else vector_of(sent),
    )


def _metadata_json(metadata: Metadata) -> str:
    cleaned: Mapping[str, object] = {
        storable(key): storable(value) if isinstance(value, str) else value for key, value in metadata.items()
    }
    return json.dumps(cleaned, ensure_ascii=False)
