"""Files of SQLite that several open at once."""

import asyncio
from pathlib import Path

import apsw

from sluice.pipelines.sqlite.connections import FileConnections, FileLimits, Schema

SCHEMA = Schema(0x51, ("CREATE TABLE numbers (number INTEGER)",))


def insert(connection: apsw.Connection, number: int) -> None:
    connection.execute("INSERT INTO numbers VALUES (?)", (number,))


def count(connection: apsw.Connection) -> int:
    found = connection.execute("SELECT count(*) FROM numbers").get
    assert isinstance(found, int)
    return found


async def test_a_new_file_may_be_opened_by_several_at_once(tmp_path: Path) -> None:
    """Gateways that start together do so. SQLite refuses some of them at once: of 30 files, about two."""
    for number in range(30):
        files = [FileConnections(tmp_path / f"{number}", "numbers", SCHEMA, FileLimits()) for _ in range(4)]
        for each in files:
            each.start()
        await asyncio.gather(*(each.write(insert, 1) for each in files))
        assert await files[0].read(count) == 4
        for each in files:
            await each.close()
