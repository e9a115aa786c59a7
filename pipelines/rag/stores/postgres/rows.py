"""Converts between values and rows."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from psycopg.adapt import Dumper
from psycopg.pq import Format

from sluice.pipelines.encoding import Vector
from sluice.pipelines.rag.stores.postgres.terms import SearchTerms, extract_terms
from sluice.pipelines.rag.types import DocumentChunk, DocumentFormat, DocumentInfo, Hit, Metadata, StoredDocument

INFO_COLUMNS = "id, title, format, content_hash, num_chars, num_chunks, metadata, updated_s"
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_BYTES_BEFORE_ELEMENTS = 4


class VectorDumper(Dumper):
    """Dumps a float32 array in pgvector's binary form: two 16-bit numbers, length and 0, then the elements."""

    format = Format.BINARY

    def dump(self, obj: Vector) -> bytes:
        return np.array([obj.size, 0], ">i2").tobytes() + obj.astype(">f4").tobytes()


def build_vector_dumper(oid: int) -> type[VectorDumper]:
    """Build the dumper for a database in which the type vector has this OID."""
    return type("VectorDumper", (VectorDumper,), {"oid": oid})


def decode_vector(sent: bytes) -> Vector:
    """Decode the result of `vector_send`."""
    return np.frombuffer(sent, ">f4", offset=_BYTES_BEFORE_ELEMENTS).astype(np.float32)


def make_storable(text: str) -> str:
    """Replace characters that Postgres cannot store, NUL and lone surrogates. Keeps the length."""
    return _UNSTORABLE.sub("\ufffd", text)


def parse_document_info(row: Sequence[Any]) -> DocumentInfo:
    """Build the info from a row of INFO_COLUMNS."""
    document_id, title, format, content_hash, num_chars, num_chunks, metadata, updated_s = row
    return DocumentInfo(
        document_id, title, DocumentFormat(format), content_hash, num_chars, num_chunks, metadata, updated_s
    )


def build_document_row(document: StoredDocument, num_chunks: int, num_terms: int) -> dict[str, Any]:
    info = document.info
    return {
        "id": make_storable(info.id),
        "title": make_storable(info.title),
        "format": info.format.value,
        "content_hash": info.content_hash,
        "num_chars": info.num_chars,
        "num_chunks": num_chunks,
        "num_terms": num_terms,
        "metadata": _encode_metadata(info.metadata),
        "updated_s": info.updated_s,
        "text": make_storable(document.text),
    }


def build_chunk_rows(document: StoredDocument, chunks: Sequence[DocumentChunk]) -> list[dict[str, Any]]:
    """Build one row for each chunk, without the document's key. Terms of title, heading and text stand apart."""
    title = extract_terms(document.info.title)
    return [_build_chunk_row(chunk, title) for chunk in chunks]


def _build_chunk_row(chunk: DocumentChunk, title: SearchTerms) -> dict[str, Any]:
    heading, text = extract_terms(chunk.heading), extract_terms(chunk.text)
    return {
        "index": chunk.index,
        "heading": make_storable(chunk.heading),
        "start": chunk.start,
        "end": chunk.end,
        "text": make_storable(chunk.text),
        "num_terms": len(title.words) + len(heading.words) + len(text.words),
        "title_words": title.prose,
        "title_names": title.tsvector,
        "heading_words": heading.prose,
        "heading_names": heading.tsvector,
        "text_words": text.prose,
        "text_names": text.tsvector,
    }


def parse_hit(row: Sequence[Any]) -> Hit:
    """Build a hit from a row that `search` selects. Its score is its similarity."""
    document_id, index, title, heading, start, end, text, metadata, similarity, sent = row
    vector = None if sent is None else decode_vector(sent)
    score = similarity or 0.0
    return Hit(document_id, index, title, heading, start, end, text, score, metadata, similarity, vector)


def _encode_metadata(metadata: Metadata) -> str:
    cleaned: Mapping[str, object] = {
        make_storable(key): make_storable(value) if isinstance(value, str) else value for key, value in metadata.items()
    }
    return json.dumps(cleaned, ensure_ascii=False)
