"""Where keys are kept: a SQLite file or a Redis that several servers share. Servers learn of changes by a version."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import randbits
from urllib.parse import urlsplit

import msgspec

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.access.identity import NO_LIMITS, QuotaLimits
from sluice.gateway.tenancy.access.keys import Change, StoredKey, decode_keys, find_key, refuse_taken_name
from sluice.state.changes import change
from sluice.state.connections import FileLimits, Schema
from sluice.state.interface import REDIS_SCHEMES, Key, Put, Record, RedisLayout, Store
from sluice.state.opening import open_store
from sluice.state.sqlite import RECORDS, FileLayout

MARKER_SUFFIX = ".required"
"""Ends the name of the empty file that says that a store has had keys."""
_KEYS, _TENANTS = "keys", "tenants"
_VERSION = Key("state", "version")
"""The record that each change of a key or a tenant replaces by another number."""
_SCHEMA = Schema(
    application_id=0x534C4B59,
    steps=(
        "CREATE TABLE keys (id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;"
        "CREATE TABLE state (version INTEGER NOT NULL) STRICT;"
        "INSERT INTO state VALUES (abs(random()))",
        "CREATE TABLE tenants (name TEXT PRIMARY KEY, limits BLOB NOT NULL) STRICT",
        f"""
        {RECORDS}
        INSERT INTO records SELECT 'keys', id, 1, 0, 9e999, length(record), record FROM keys;
        INSERT INTO records SELECT 'tenants', name, 1, 0, 9e999, length(limits), limits FROM tenants;
        INSERT INTO records
            SELECT 'state', 'version', 1, 0, 9e999, length(version), CAST(CAST(version AS TEXT) AS BLOB) FROM state;
        DROP TABLE keys; DROP TABLE tenants; DROP TABLE state
        """,
    ),
)
_UPGRADE = """
for _, shelf in ipairs({'keys', 'tenants'}) do
    local found, to = redis.call('HGETALL', 'sluice:' .. shelf), 'sluice:{access}:' .. shelf
    for i = 1, #found, 2 do
        redis.call('HSET', to .. ':' .. found[i], 'version', 1, 'body', found[i + 1])
        redis.call('SADD', to, found[i])
    end
    redis.call('DEL', 'sluice:' .. shelf)
end
local version = redis.call('GET', 'sluice:keys:version')
if version then
    redis.call('HSET', 'sluice:{access}:state:version', 'version', 1, 'body', version)
    redis.call('SADD', 'sluice:{access}:state', 'version')
    redis.call('DEL', 'sluice:keys:version')
end
"""
"""Moves keys and tenants of versions that had each in one hash."""
IN_FILE = FileLayout("the key store {}", _SCHEMA, FileLimits(num_readers=1))
_IN_REDIS = RedisLayout("sluice:{access}:", "--keys-store", is_listed=True, upgrade=_UPGRADE, is_logged=False)


class KeyStore:
    """Keeps keys, and the limits of tenants. Every method raises UNAVAILABLE where the store cannot be used.

    The first key creates the file of a store, and beside it a marker, an empty file, which says that the store has had
    a key: a server whose file is lost does not take all requests then. What a Redis has lost it does not know, but a
    Redis is named, and so required, wherever it is used.
    """

    def __init__(self, store: Store, place: str, path: Path | None = None) -> None:
        """`place` is where the store is, without a password; `path` the file of one that is in a file."""
        self.place = place
        self._store = store
        self._path = path
        self._marker = None if path is None else path.with_name(path.name + MARKER_SUFFIX)

    def _exists(self) -> bool:
        return self._path is None or self._is_there(self._path)

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
        """Return whether the store has had a key, also where it has lost them all since, as far as it remembers."""
        return self._marker is not None and self._is_there(self._marker)

    async def note_keys(self) -> None:
        """Remember that the store has a key."""
        marker = self._marker
        if marker is None or self._is_there(marker):
            return
        try:
            await asyncio.to_thread(marker.touch, 0o600)
        except OSError as error:
            message = f"{marker} cannot be written: {error}; --require-keys has the same effect"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error

    async def version(self) -> int:
        """Return a number that is another after every change of a key, and 0 where there is no key yet."""
        found = await self._store.get(_VERSION) if self._exists() else None
        return 0 if found is None else int(found.body)

    async def load(self) -> list[StoredKey]:
        """Return all keys, revoked ones too, the oldest first."""
        records = await self._store.scan(_KEYS) if self._exists() else {}
        return _decode(records)

    async def add(self, key: StoredKey) -> None:
        """Add a key. Raises ALREADY_EXISTS for the name of a key that is not revoked."""

        def add(keys: Iterable[StoredKey]) -> StoredKey:
            refuse_taken_name(keys, key.name)
            return key

        await self._write(add)
        with suppress(SluiceError):  # the key is there; a server that finds it says that the marker is not
            await self.note_keys()

    async def change(self, name: str, change: Change) -> StoredKey:
        """Change the key with that name or id, which is not revoked, and return it. Raises NOT_FOUND."""
        if not self._exists():
            return find_key((), name)
        return await self._write(lambda keys: change(find_key(keys, name)))

    async def _write(self, choose: Callable[[Iterable[StoredKey]], StoredKey]) -> StoredKey:
        """Write the key that is chosen by all keys; choose again where another server changes one meanwhile."""

        async def decide(_: bytes | None) -> tuple[StoredKey, Sequence[Put]]:
            key = choose(_decode(await self._store.scan(_KEYS)))
            return key, (_next_version(), Put(Key(_KEYS, key.id), msgspec.json.encode(key)))

        return await change(self._store, _VERSION, decide)

    async def load_tenants(self) -> dict[str, QuotaLimits]:
        """Return the limits of the tenants that have some, by name."""
        records = await self._store.scan(_TENANTS) if self._exists() else {}
        return {name: msgspec.json.decode(records[name].body, type=QuotaLimits) for name in sorted(records)}

    async def set_tenant(self, name: str, limits: QuotaLimits) -> None:
        """Set the limits of a tenant; none forget it."""
        body = None if limits == NO_LIMITS else msgspec.json.encode(limits)
        await self._store.put(_next_version(), Put(Key(_TENANTS, name), body))

    async def close(self) -> None:
        await self._store.close()


def _decode(records: Mapping[str, Record]) -> list[StoredKey]:
    return decode_keys(each.body for each in records.values())


def _next_version() -> Put:
    """Say that something changes."""
    return Put(_VERSION, b"%d" % (1 + randbits(62)))


def open_keys(place: str) -> KeyStore:
    """Open the store at a path or URL, at its first use. Raises ValueError for a URL that is none of Redis."""
    store = open_store(place, IN_FILE, _IN_REDIS)
    if not place.lower().startswith(REDIS_SCHEMES):
        return KeyStore(store, str(Path(place)), Path(place))
    parts = urlsplit(place)
    return KeyStore(store, f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}")
