"""BM25 over words: one FTS5 table for each collection, so that other collections' words do not count in its ranking.

Text, heading and title weigh the same: giving headings more weight found less (benchmarks/rag/quality.py).
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import apsw

from sluice.pipelines.rag.stores.sqlite import schema
from sluice.pipelines.rag.stores.sqlite.filter_sql import SqlFragment
from sluice.state.queries import query_row, query_rows

_SPLIT = ("unicode61", "remove_diacritics", "2")
"""Tokenizer that splits `max_num_seqs`, `str.partition` and `--http-port` into their words and removes accents."""
_STEM = ("porter", *_SPLIT)
"""Tokenizer that also stems English words: the same measure found less without it."""
_MAX_TERMS = 256
"""Most terms of one question: more of them only take more time."""
_MANY_CHUNKS = 4096
"""Chunks from which on words that nearly every chunk contains take more time than all other words of a question."""
_PIECE = re.compile(r"\S+")


def create_index(connection: apsw.Connection, collection: int) -> None:
    """Create the collection's index. It is contentless: the texts stand in `chunks`, in rows of the same ids."""
    connection.execute(
        f"CREATE VIRTUAL TABLE words_{collection:d} USING fts5("
        f"text, heading, title, content='', contentless_delete=1, tokenize='{' '.join(_STEM)}')"
    )
    connection.execute(f"CREATE VIRTUAL TABLE terms_{collection:d} USING fts5vocab(words_{collection:d}, row)")


def drop_index(connection: apsw.Connection, collection: int) -> None:
    connection.execute(f"DROP TABLE terms_{collection:d}")
    connection.execute(f"DROP TABLE words_{collection:d}")


def add_chunk(connection: apsw.Connection, collection: int, chunk: int, text: str, heading: str, title: str) -> None:
    connection.execute(
        f"INSERT INTO words_{collection:d}(rowid, text, heading, title) VALUES (?, ?, ?, ?)",
        (chunk, text, heading, title),
    )


def remove_document(connection: apsw.Connection, collection: int, document: int) -> None:
    connection.execute(
        f"DELETE FROM words_{collection:d} WHERE rowid BETWEEN ? AND ?", schema.chunk_id_bounds(document)
    )


def rank_chunks(
    connection: apsw.Connection, collection: int, question: str, limit: int, documents: SqlFragment | None
) -> list[tuple[int, float]]:
    """Rank chunks that contain a word of the question by BM25, best first.

    Equal ones stay in the order in which they were added. `documents` selects the row ids of the documents to search.
    """
    match = _match_expression(connection, collection, question)
    if not match:
        return []
    table = f"words_{collection:d}"
    condition = f"AND {schema.DOCUMENT_SQL.format('rowid')} IN ({documents.text})" if documents else ""
    found = query_rows(
        connection,
        f"SELECT rowid, -bm25({table}) AS score FROM {table} "
        f"WHERE {table} MATCH ? {condition} ORDER BY score DESC, rowid LIMIT ?",
        (match, *(documents.values if documents else ()), limit),
    )
    return [(chunk, score) for chunk, score in found]


def _match_expression(connection: apsw.Connection, collection: int, question: str) -> str:
    """Match any of the question's words, and names among them, such as `max_num_seqs`, also as phrases."""
    terms = _first_distinct(_split_terms(connection, question), _MAX_TERMS)
    rare = _drop_frequent(connection, collection, terms)
    return " OR ".join(f'"{term}"' for term in rare or terms)


def _split_terms(connection: apsw.Connection, question: str) -> Iterator[str]:
    """Split the question by FTS5's own tokenizer, which leaves no character that has a meaning in FTS5's queries."""
    for piece in _PIECE.findall(question):
        words = _tokenize(connection, _SPLIT, piece)
        yield from words
        if len(words) > 1:
            yield " ".join(words)


def _first_distinct(terms: Iterable[str], limit: int) -> list[str]:
    """Return the first `limit` distinct terms. Reads no more terms than needed."""
    found: dict[str, None] = {}
    for term in terms:
        found[term] = None
        if len(found) == limit:
            break
    return list(found)


def _drop_frequent(connection: apsw.Connection, collection: int, terms: Sequence[str]) -> list[str]:
    """Drop words that more than half of all chunks contain, whose weight in FTS5's BM25 is a millionth."""
    row = query_row(connection, "SELECT num_chunks FROM collections WHERE id = ?", (collection,))
    num_chunks = row[0] if row else 0
    if num_chunks < _MANY_CHUNKS:
        return list(terms)
    return [term for term in terms if " " in term or _count_chunks(connection, collection, term) <= num_chunks / 2]


def _count_chunks(connection: apsw.Connection, collection: int, word: str) -> int:
    stem = "".join(_tokenize(connection, _STEM, word))
    row = query_row(connection, f"SELECT doc FROM terms_{collection:d} WHERE term = ?", (stem,))
    return row[0] if row else 0


def _tokenize(connection: apsw.Connection, tokenizer: tuple[str, ...], text: str) -> list[str]:
    tokenize = connection.fts5_tokenizer(tokenizer[0], list(tokenizer[1:]))
    utf8 = text.encode(errors="replace")
    tokens = tokenize(utf8, apsw.FTS5_TOKENIZE_QUERY, None, include_offsets=False, include_colocated=False)
    return [str(token) for token in tokens]
