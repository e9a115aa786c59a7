"""Opens a store at a place: a file's path, or the URL of a Redis."""

import time
from collections.abc import Callable
from pathlib import Path

from sluice.state.interface import REDIS_SCHEMES, RedisLayout, Store
from sluice.state.sqlite import Bounds, FileLayout, StoreInFile


def open_store(
    place: str,
    in_file: FileLayout,
    in_redis: RedisLayout,
    bounds: Bounds | None = None,
    clock: Callable[[], float] = time.time,
) -> Store:
    """Open a store at its first use. Raises ValueError for a URL that is none of Redis.

    `bounds` are those of a file; `clock` returns seconds since 1970.
    """
    if not place.lower().startswith(REDIS_SCHEMES):
        return StoreInFile(Path(place), in_file, bounds, clock)
    from sluice.state.redis_store import StoreInRedis  # few servers need Redis' client

    return StoreInRedis(place, in_redis)
