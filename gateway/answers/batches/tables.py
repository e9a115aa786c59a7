"""The tables of files and batches: queries on one connection, each within a transaction of its caller."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import apsw
import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.batches.records import UNFINISHED, Batch, FileRecord
from sluice.state.connections import Schema
from sluice.state.queries import query_row, query_rows

_STEPS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        expires_at INTEGER,
        record BLOB NOT NULL
    ) STRICT;
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        record BLOB NOT NULL
    ) STRICT;
    CREATE INDEX batches_by_status ON batches (status);
    """,
)
SCHEMA = Schema(0x536C7362, _STEPS)
"""The header's mark is "Slsb"."""
MAX_UNFINISHED = 100
"""Most batches that are not finished."""
MAX_FINISHED = 10_000
"""Most batches that are kept after their end."""
_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED)
_encode = msgspec.json.Encoder().encode
_decode_file = msgspec.json.Decoder(FileRecord).decode
_decode_batch = msgspec.json.Decoder(Batch).decode


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list with at most `limit` entries after that of the id `after`, newest first unless
    `is_ascending`."""

    limit: int
    after: str = ""
    is_ascending: bool = False


def add_file(connection: apsw.Connection, record: FileRecord, max_stored_bytes: int | None = None) -> None:
    """Add a file. Raises TOO_LARGE where all files would exceed `max_stored_bytes`."""
    row = query_row(connection, "SELECT coalesce(sum(num_bytes), 0) FROM files")
    stored = row[0] if row is not None else 0
    if max_stored_bytes is not None and stored + record.num_bytes > max_stored_bytes:
        raise SluiceError(
            ErrorCode.TOO_LARGE,
            f"file has {record.num_bytes} bytes and the stored files have {stored}; together they may have "
            f"{max_stored_bytes} (--max-stored-files-size): delete some first",
            param="file",
        )
    connection.execute(
        "INSERT INTO files (id, owner, purpose, num_bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (record.id, record.owner, record.purpose, record.num_bytes, record.expires_at, _encode(record)),
    )


def read_file(connection: apsw.Connection, owner: str, file_id: str, now: int) -> FileRecord:
    """Return the owner's file. Raises NOT_FOUND, also for one that has expired."""
    row = query_row(
        connection,
        "SELECT record FROM files WHERE id = ? AND owner = ? AND coalesce(expires_at, ?) >= ?",
        (file_id, owner, now, now),
    )
    if row is None:
        raise SluiceError(ErrorCode.NOT_FOUND, f"No such File object: {file_id[:80]!r}", param="file_id")
    return _decode_file(row[0])


def list_files(connection: apsw.Connection, owner: str, purpose: str, page: Page, now: int) -> list[FileRecord]:
    """Return one file more than the page takes, where there are more."""
    condition = "coalesce(expires_at, ?) >= ? AND (? = '' OR purpose = ?)"
    rows = _list_rows(connection, "files", owner, page, condition, (now, now, purpose, purpose))
    return [_decode_file(row) for row in rows]


def delete_file(connection: apsw.Connection, owner: str, file_id: str, now: int) -> None:
    """Delete the owner's file from the table. Raises NOT_FOUND, and INVALID for one that a batch reads."""
    read_file(connection, owner, file_id, now)
    query = f"SELECT id, status FROM batches WHERE input_file_id = ? AND status IN ({_UNFINISHED})"
    if (user := query_row(connection, query, (file_id,))) is not None:
        message = f"file {file_id} is the input of {user[0]}, which is {user[1]}; cancel the batch first"
        raise invalid("file_id", message)
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def delete_expired_files(connection: apsw.Connection, now: int) -> list[str]:
    """Delete the files that have expired, and return their ids. One that a batch reads stays until its end."""
    query = (
        f"DELETE FROM files WHERE expires_at < ? AND id NOT IN "
        f"(SELECT input_file_id FROM batches WHERE status IN ({_UNFINISHED})) RETURNING id"
    )
    return [row[0] for row in query_rows(connection, query, (now,))]


def known_files(connection: apsw.Connection) -> set[str]:
    """Return the id of every file, also of those that unfinished batches write."""
    ids = {row[0] for row in query_rows(connection, "SELECT id FROM files")}
    return ids | {each for batch in unfinished_batches(connection) for each in (batch.output_id, batch.errors_id)}


def add_batch(connection: apsw.Connection, batch: Batch, now: int) -> None:
    """Add a batch. Raises INVALID for an input file that is none, OVERLOADED for too many unfinished batches."""
    try:
        file = read_file(connection, batch.owner, batch.input_file_id, now)
    except SluiceError as error:
        raise invalid("input_file_id", f"input_file_id: {error.message}") from None
    if file.purpose != "batch":
        message = f"input_file_id must be a file whose purpose is 'batch', got {file.id}, whose is {file.purpose!r}"
        raise invalid("input_file_id", message)
    row = query_row(connection, f"SELECT count(*) FROM batches WHERE status IN ({_UNFINISHED})")
    if row is not None and row[0] >= MAX_UNFINISHED:
        message = f"{row[0]} batches are unfinished, and there may be {MAX_UNFINISHED}; send this one again later"
        raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=60.0)
    connection.execute(
        "INSERT INTO batches (id, owner, status, input_file_id, record) VALUES (?, ?, ?, ?, ?)",
        (batch.id, batch.owner, batch.status, batch.input_file_id, _encode(batch)),
    )
    query = "SELECT number FROM batches ORDER BY number DESC LIMIT 1 OFFSET ?"
    if (oldest := query_row(connection, query, (MAX_FINISHED,))) is not None:
        statement = f"DELETE FROM batches WHERE number <= ? AND status NOT IN ({_UNFINISHED})"
        connection.execute(statement, (oldest[0],))


def read_batch(connection: apsw.Connection, batch_id: str, owner: str | None = None) -> Batch:
    """Return the batch of the owner, or of anybody. Raises NOT_FOUND."""
    query = "SELECT record FROM batches WHERE id = ? AND (? IS NULL OR owner = ?)"
    row = query_row(connection, query, (batch_id, owner, owner))
    if row is None:
        raise SluiceError(ErrorCode.NOT_FOUND, f"No batch found with id {batch_id[:80]!r}", param="batch_id")
    return _decode_batch(row[0])


def list_batches(connection: apsw.Connection, owner: str, page: Page, endpoint: str = "") -> list[Batch]:
    """Return one batch more than the page takes, where there are more; "" is any endpoint."""
    condition = "? IN ('', json_extract(CAST(record AS TEXT), '$.endpoint'))"
    return [_decode_batch(row) for row in _list_rows(connection, "batches", owner, page, condition, (endpoint,))]


def delete_batch(connection: apsw.Connection, owner: str, batch_id: str) -> list[str]:
    """Delete a batch of the owner, and the files that it read and wrote. Returns their ids. Raises NOT_FOUND, and
    INVALID for one that is not over."""
    batch = read_batch(connection, batch_id, owner)
    if batch.status in UNFINISHED:
        raise invalid(
            "batch_id", f"batch {batch_id} is {batch.status}; cancel it first, and delete it when it has ended"
        )
    connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
    files = (batch.input_file_id, batch.output_id, batch.errors_id)
    return [row[0] for row in query_rows(connection, "DELETE FROM files WHERE id IN (?, ?, ?) RETURNING id", files)]


def unfinished_batches(connection: apsw.Connection) -> list[Batch]:
    """Return everybody's unfinished batches, the oldest first."""
    query = f"SELECT record FROM batches WHERE status IN ({_UNFINISHED}) ORDER BY number"
    return [_decode_batch(row[0]) for row in query_rows(connection, query)]


def change_batch(
    connection: apsw.Connection,
    batch_id: str,
    change: Callable[[Batch], Batch],
    owner: str | None = None,
    outputs: Iterable[FileRecord] = (),
) -> Batch:
    """Replace the batch by what `change` returns for it, and publish `outputs`. Returns the new one. Raises as
    `read_batch` and as `change`."""
    batch = change(read_batch(connection, batch_id, owner))
    statement = "UPDATE batches SET status = ?, record = ? WHERE id = ?"
    connection.execute(statement, (batch.status, _encode(batch), batch_id))
    for record in outputs:
        add_file(connection, record)
    return batch


def _list_rows(
    connection: apsw.Connection, table: str, owner: str, page: Page, condition: str, values: tuple[object, ...]
) -> list[bytes]:
    """Return the encoded records. Raises INVALID where `after` is none of the owner's."""
    sign, direction = (">", "ASC") if page.is_ascending else ("<", "DESC")
    start: tuple[object, ...] = ()
    if page.after:
        row = query_row(connection, f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, owner))
        if row is None:
            raise invalid("after", f"after must be the id of one of the {table}, got {page.after[:80]!r}")
        condition, start = f"{condition} AND number {sign} ?", (row[0],)
    query = f"SELECT record FROM {table} WHERE owner = ? AND {condition} ORDER BY number {direction} LIMIT ?"
    return [row[0] for row in query_rows(connection, query, (owner, *values, *start, page.limit + 1))]
