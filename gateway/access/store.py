"""Where keys are kept: a SQLite file or a Redis that several servers share. Servers learn of changes by a version."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import apsw
import msgspec

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.access.identity import NO_LIMITS, QuotaLimits
from sluice.gateway.access.keys import Change, StoredKey, decode_keys, find_key, refuse_taken_name
from sluice.pipelines.sqlite.connections import FileConnections, FileLimits, Schema
from sluice.pipelines.sqlite.queries import query_row, query_rows

_Read = TypeVar("_Read")
REDIS_SCHEMES = ("redis", "rediss")


class KeyStore(Protocol):
    """Keeps keys. Every method raises UNAVAILABLE where the store cannot be used."""

    place: str
    """Where it is, without a password."""

    async def had_keys(self) -> bool:
        """Return whether the store has had a key, also where it has lost them all since, as far as it remembers."""

    async def note_keys(self) -> None:
        """Remember that the store has a key."""

    async def version(self) -> int:
        """Return a number that is another after every change of a key, and 0 where there is no key yet."""

    async def load(self) -> list[StoredKey]:
        """Return all keys, revoked ones too, the oldest first."""

    async def add(self, key: StoredKey) -> None:
        """Add a key. Raises ALREADY_EXISTS for the name of a key that is not revoked."""

    async def change(self, name: str, change: Change) -> StoredKey:
        """Change the key with that name or id, which is not revoked, and return it. Raises NOT_FOUND."""

    async def load_tenants(self) -> dict[str, QuotaLimits]:
        """Return the limits of the tenants that have some, by name."""

    async def set_tenant(self, name: str, limits: QuotaLimits) -> None:
        """Set the limits of a tenant; none forget it."""

    async def close(self) -> None: ...


_SCHEMA = Schema(
    application_id=0x534C4B59,
    steps=(
        "CREATE TABLE keys (id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;"
        "CREATE TABLE state (version INTEGER NOT NULL) STRICT;"
        "INSERT INTO state VALUES (abs(random()))",
        "CREATE TABLE tenants (name TEXT PRIMARY KEY, limits BLOB NOT NULL) STRICT",
    ),
)


MARKER_SUFFIX = ".required"
"""Ends the name of the empty file that says that a store has had keys."""


class SqliteKeys:
    """Keys in a file, which the first key creates.

    A marker beside it, an empty file, says that it has had a key: a server whose file is lost does not take all
    requests then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._marker = path.with_name(path.name + MARKER_SUFFIX)
        self.place = str(path)
        self._file = FileConnections(path, f"the key store {path}", _SCHEMA, FileLimits(num_readers=1))

    def _exists(self) -> bool:
        return self._is_there(self._path)

    def _is_there(self, path: Path) -> bool:
        """Whether a file exists. Raises UNAVAILABLE where that is not to be known, which `Path.exists` hides."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"the key store {self._path} cannot be used: {error}") from error
        return True

    async def had_keys(self) -> bool:
        return self._is_there(self._marker)

    async def note_keys(self) -> None:
        def write() -> None:
            try:
                self._marker.touch(0o600)
            except OSError as error:
                message = f"{self._marker} cannot be written: {error}; --require-keys has the same effect"
                raise SluiceError(ErrorCode.UNAVAILABLE, message) from error

        if not self._is_there(self._marker):
            await asyncio.to_thread(write)

    async def version(self) -> int:
        return await self._read(_version) if self._exists() else 0

    async def load(self) -> list[StoredKey]:
        return await self._read(_load) if self._exists() else []

    async def add(self, key: StoredKey) -> None:
        def add(connection: apsw.Connection) -> None:
            refuse_taken_name(_load(connection), key.name)
            _write(connection, key)

        self._file.start()
        await self._file.write(add)
        with suppress(SluiceError):  # the key is there; a server that finds it says that the marker is not
            await self.note_keys()

    async def change(self, name: str, change: Change) -> StoredKey:
        def replace(connection: apsw.Connection) -> StoredKey:
            changed = change(find_key(_load(connection), name))
            _write(connection, changed)
            return changed

        if not self._exists():
            return find_key((), name)
        self._file.start()
        return await self._file.write(replace)

    async def load_tenants(self) -> dict[str, QuotaLimits]:
        return await self._read(_load_tenants) if self._exists() else {}

    async def set_tenant(self, name: str, limits: QuotaLimits) -> None:
        def write(connection: apsw.Connection) -> None:
            if limits == NO_LIMITS:
                connection.execute("DELETE FROM tenants WHERE name = ?", (name,))
            else:
                connection.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?)", (name, msgspec.json.encode(limits)))
            connection.execute("UPDATE state SET version = abs(random())")

        self._file.start()
        await self._file.write(write)

    async def _read(self, work: Callable[[apsw.Connection], _Read]) -> _Read:
        self._file.start()
        return await self._file.read(work)

    async def close(self) -> None:
        await self._file.close()


def _version(connection: apsw.Connection) -> int:
    row = query_row(connection, "SELECT version FROM state")
    assert row is not None
    return int(row[0])


def _load(connection: apsw.Connection) -> list[StoredKey]:
    rows = query_rows(connection, "SELECT record FROM keys")
    return decode_keys(record for (record,) in rows)


def _load_tenants(connection: apsw.Connection) -> dict[str, QuotaLimits]:
    rows = query_rows(connection, "SELECT name, limits FROM tenants ORDER BY name")
    return {name: msgspec.json.decode(limits, type=QuotaLimits) for name, limits in rows}


def _write(connection: apsw.Connection, key: StoredKey) -> None:
    connection.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (key.id, msgspec.json.encode(key)))
    connection.execute("UPDATE state SET version = abs(random())")


def open_keys(place: str) -> KeyStore:
    """Open the store at a path or URL, at its first use. Raises ValueError for a URL that is none of Redis."""
    if urlsplit(place).scheme not in REDIS_SCHEMES:
        return SqliteKeys(Path(place))
    from sluice.gateway.access.redis_store import RedisKeys  # few servers need Redis' client

    return RedisKeys(place)
