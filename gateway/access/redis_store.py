"""Keys in Redis, which gateways of several machines share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import randbits
from typing import cast
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.access.identity import NO_LIMITS, QuotaLimits
from sluice.gateway.access.keys import Change, StoredKey, decode_keys, find_key, refuse_taken_name

_KEYS = "sluice:keys"
"""A hash of the keys' records by id."""
_TENANTS = "sluice:tenants"
"""A hash of the tenants' limits by name."""
_VERSION = "sluice:keys:version"
_TIMEOUT_S = 5.0


class RedisKeys:
    """Keys in a hash. A change is a transaction, made again where another server changed a key meanwhile."""

    def __init__(self, url: str) -> None:
        """Connects at the first use. Raises ValueError for a URL that is none of Redis."""
        parts = urlsplit(url)
        self.place = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
        self._client = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)

    async def had_keys(self) -> bool:
        """Return False: what a Redis has lost it does not know. It is named, and so required, wherever it is used."""
        return False

    async def note_keys(self) -> None: ...

    async def version(self) -> int:
        with _translate_errors():
            return int(await self._client.get(_VERSION) or 0)

    async def load(self) -> list[StoredKey]:
        with _translate_errors():
            return decode_keys(cast("dict[bytes, bytes]", await self._client.hgetall(_KEYS)).values())

    async def add(self, key: StoredKey) -> None:
        def add(keys: list[StoredKey]) -> StoredKey:
            refuse_taken_name(keys, key.name)
            return key

        await self._write(add)

    async def change(self, name: str, change: Change) -> StoredKey:
        return await self._write(lambda keys: change(find_key(keys, name)))

    async def _write(self, choose: Callable[[list[StoredKey]], StoredKey]) -> StoredKey:
        with _translate_errors():
            while True:
                async with self._client.pipeline() as transaction:
                    await transaction.watch(_VERSION)
                    records = cast("dict[bytes, bytes]", await transaction.hgetall(_KEYS))
                    key = choose(decode_keys(records.values()))
                    transaction.multi()  # type: ignore[no-untyped-call]  # redis lacks its type
                    transaction.hset(_KEYS, key.id, msgspec.json.encode(key))
                    transaction.set(_VERSION, 1 + randbits(62))
                    try:
                        await transaction.execute()
                    except WatchError:
                        continue
                    return key

    async def load_tenants(self) -> dict[str, QuotaLimits]:
        with _translate_errors():
            found = cast("dict[bytes, bytes]", await self._client.hgetall(_TENANTS))
        limits = {name.decode(): msgspec.json.decode(record, type=QuotaLimits) for name, record in found.items()}
        return dict(sorted(limits.items()))

    async def set_tenant(self, name: str, limits: QuotaLimits) -> None:
        with _translate_errors():
            async with self._client.pipeline() as transaction:
                if limits == NO_LIMITS:
                    transaction.hdel(_TENANTS, name)
                else:
                    transaction.hset(_TENANTS, name, msgspec.json.encode(limits))
                transaction.incr(_VERSION)
                await transaction.execute()

    async def close(self) -> None:
        await self._client.aclose()


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise SluiceError(ErrorCode.UNAVAILABLE, f"--keys-store cannot be used: {reason}") from error
