"""The interface of a store: records by shelf and name, each with a version, which servers share."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

REDIS_SCHEMES = ("redis://", "rediss://")
"""Begin the URL of a Redis."""
ABSENT = 0
"""The version of a record that is not there."""


class Key(NamedTuple):
    """The shelf of a record and its name there. Records of one shelf are listed together."""

    shelf: str
    name: str


class Record(NamedTuple):
    """A record's content and its version, which each change raises."""

    body: bytes
    version: int


class Put(NamedTuple):
    """A change of one record."""

    key: Key
    body: bytes | None
    """Its new content; None deletes it."""
    version: int | None = None
    """The version that it must have, ABSENT where it must not be there; None for any."""
    ttl_s: float | None = None
    """Seconds for which it is kept; None for ever."""


class RedisLayout(NamedTuple):
    """The layout of a store in Redis."""

    prefix: str
    """Begins all names."""
    name: str
    """Names the store in errors."""
    is_listed: bool = False
    """Whether shelves are listed."""
    upgrade: str = ""
    """A script that brings what older versions wrote into this layout."""
    timeout_s: float = 5.0
    is_logged: bool = True
    """Whether outages are logged; the one who uses the store may do that."""


class Store(Protocol):
    """Keeps records. Every method raises UNAVAILABLE where the store cannot be used now."""

    async def get(self, key: Key) -> Record | None: ...

    async def scan(self, shelf: str) -> Mapping[str, Record]:
        """Return the records of a shelf by name. A store in Redis lists them only where it was opened to."""
        ...

    async def put(self, *puts: Put) -> bool:
        """Make all changes at once. False, and none is made, where a record has another version than its change
        names."""
        ...

    async def delete(self, key: Key) -> bool:
        """Delete a record. False where there is none."""
        ...

    def problem(self) -> str:
        """Return the error of the store's last use; "" if there was none."""
        ...

    async def close(self) -> None: ...
