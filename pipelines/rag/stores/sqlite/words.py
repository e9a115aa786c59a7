"""Words and their ranking: one FTS5 table for each collection, so that no other's words weigh in its BM25.

Text, heading and title weigh alike: to weigh headings more found less (benchmarks/rag/quality.py).
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import apsw

from pipelines.rag.stores.sqlite import chunk_ids
from pipelines.rag.stores.sqlite.conditions import Sql
from pipelines.rag.stores.sqlite.rows import one_row, rows

_SPLIT = ("unicode61", "remove_diacritics", "2")
"""Splits `max_num_seqs`, `str.partition` and `--http-port` into their words, and takes accents off."""
_STEM = ("porter", *_SPLIT)
"""And stems English: the same measure found less without it."""
_MAX_TERMS = 256
"""Of one question: beyond them nothing changes but the time that it takes."""
_MANY_CHUNKS = 4096
"""From here on the words that nearly every chunk holds cost more time than all others of a question."""
_PIECE = re.compile(r"\S+")


def create(connection: apsw.Connection, collection: int) -> None:
    """Contentless: the texts stand in `chunks`, and here only their index, with rows of the same ids."""
    connection.execute(
        f"CREATE VIRTUAL TABLE words_{collection:d} USING fts5("
        f"text, heading, title, content='', contentless_delete=1, tokenize='{' '.join(_STEM)}')"
    )
    connection.execute(f"CREATE VIRTUAL TABLE terms_{collection:d} USING fts5vocab(words_{collection:d}, row)")


def drop(connection: apsw.Connection, collection: int) -> None:
    connection.execute(f"DROP TABLE terms_{collection:d}")
    connection.execute(f"DROP TABLE words_{collection:d}")


def add(connection: apsw.Connection, collection: int, chunk: int, text: str, heading: str, title: str) -> None:
    connection.execute(
        f"INSERT INTO words_{collection:d}(rowid, text, heading, title) VALUES (?, ?, ?, ?)",
        (chunk, text, heading, title),
    )


def remove(connection: apsw.Connection, collection: int, document: int) -> None:
    """Those of all of the document's chunks."""
    connection.execute(f"DELETE FROM words_{collection:d} WHERE rowid BETWEEN ? AND ?", chunk_ids.bounds(document))


def ranked(
    connection: apsw.Connection, collection: int, question: str, limit: int, documents: Sql | None
) -> list[tuple[int, float]]:
    """Chunks that hold a word of the question and their BM25, best first; equals in the order in which they came."""
    match = _match_expression(connection, collection, question)
    if not match:
        return []
    table = f"words_{collection:d}"
    permitted = f"AND {chunk_ids.DOCUMENT_SQL.format('rowid')} IN ({documents.text})" if documents else ""
    found = rows(
        connection,
        f"SELECT rowid, -bm25({table}) AS score FROM {table} "
        f"WHERE {table} MATCH ? {permitted} ORDER BY score DESC, rowid LIMIT ?",
        (match, *(documents.values if documents else ()), limit),
    )
    return [(chunk, score) for chunk, score in found]


def _match_expression(connection: apsw.Connection, collection: int, question: str) -> str:
    """Any of the question's words, and the names among them, such as `max_num_seqs`, as a whole besides."""
    terms = _first_distinct(_terms(connection, question), _MAX_TERMS)
    telling = _telling(connection, collection, terms)
    return " OR ".join(f'"{term}"' for term in telling or terms)


def _terms(connection: apsw.Connection, question: str) -> Iterator[str]:
    """Split by FTS5's own tokenizer, which leaves nothing in them that FTS5 gives a meaning to."""
    for piece in _PIECE.findall(question):
        words = _tokens(connection, _SPLIT, piece)
        yield from words
        if len(words) > 1:
            yield " ".join(words)


def _first_distinct(terms: Iterable[str], limit: int) -> list[str]:
    """Reads no further than it must."""
    found: dict[str, None] = {}
    for term in terms:
        found[term] = None
        if len(found) == limit:
            break
    return list(found)


def _telling(connection: apsw.Connection, collection: int, terms: Sequence[str]) -> list[str]:
    """Without the words of more than half of all chunks, to which FTS5's BM25 gives a millionth of a weight."""
    row = one_row(connection, "SELECT num_chunks FROM collections WHERE id = ?", (collection,))
    num_chunks = row[0] if row else 0
    if num_chunks < _MANY_CHUNKS:
        return list(terms)
    return [term for term in terms if " " in term or _num_holding(connection, collection, term) <= num_chunks / 2]


def _num_holding(connection: apsw.Connection, collection: int, word: str) -> int:
    stem = "".join(_tokens(connection, _STEM, word))
    row = one_row(connection, f"SELECT doc FROM terms_{collection:d} WHERE term = ?", (stem,))
    return row[0] if row else 0


def _tokens(connection: apsw.Connection, tokenizer: tuple[str, ...], text: str) -> list[str]:
    tokenize = connection.fts5_tokenizer(tokenizer[0], list(tokenizer[1:]))
    utf8 = text.encode(errors="replace")
    tokens = tokenize(utf8, apsw.FTS5_TOKENIZE_QUERY, None, include_offsets=False, include_colocated=False)
    return [str(token) for token in tokens]
