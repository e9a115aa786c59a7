"""Queries and transactions on one connection."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw

Row = tuple[Any, ...]


def query_rows(connection: apsw.Connection, query: str, values: tuple[object, ...] = ()) -> Iterator[Row]:
    """Run a query and yield its rows, each read when it is taken."""
    yield from connection.execute(query, values)


def query_row(connection: apsw.Connection, query: str, values: tuple[object, ...] = ()) -> Row | None:
    """Run a query and return its first row, None if there is none."""
    return next(query_rows(connection, query, values), None)


@contextmanager
def read_transaction(connection: apsw.Connection) -> Iterator[None]:
    """Read from one snapshot."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        _rollback(connection)


@contextmanager
def write_transaction(connection: apsw.Connection) -> Iterator[None]:
    """Write all changes to disk at the end, or none of them after an error.

    Takes the write lock at once: a transaction that began as a reader would fail at another writer's change.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        _rollback(connection)


def _rollback(connection: apsw.Connection) -> None:
    """End the transaction if it is still open: SQLite ends it by itself after some errors."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
