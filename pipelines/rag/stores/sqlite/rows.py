"""What queries answer, a tuple a row."""

from collections.abc import Iterator
from typing import Any

import apsw

Row = tuple[Any, ...]


def rows(connection: apsw.Connection, query: str, values: tuple[object, ...] = ()) -> Iterator[Row]:
    """Read as they are taken."""
    yield from connection.execute(query, values)


def one_row(connection: apsw.Connection, query: str, values: tuple[object, ...] = ()) -> Row | None:
    """The first, where there is one."""
    return next(rows(connection, query, values), None)
