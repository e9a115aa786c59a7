"""Transactions of one connection."""

from collections.abc import Iterator
from contextlib import contextmanager

import apsw


@contextmanager
def reading(connection: apsw.Connection) -> Iterator[None]:
    """All that is read inside is of one moment."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        _rollback(connection)


@contextmanager
def writing(connection: apsw.Connection) -> Iterator[None]:
    """All that is written inside is on disk at the end, or, after an error, none of it.

    Takes the write lock first: a transaction that begins as a reader and finds another writer's change fails at once.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        _rollback(connection)


def _rollback(connection: apsw.Connection) -> None:
    """End what is still open: SQLite itself ends a transaction after some errors."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
