"""The cache in a Redis server (`--cache-config=redis`), which gateways share and which outlives them."""

import asyncio
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, cast

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from serving.caching.answers import CachedAnswers
from serving.caching.availability import Availability
from serving.caching.lane import Lane
from serving.caching.remote import RemoteAnswers
from serving.caching.settings import RedisCacheSettings, RedisTls
from serving.caching.store import CacheStore, Run
from serving.statistics import CacheUsage, ModelStatistics

if TYPE_CHECKING:
    from serving.spec import ModelSource

_MAX_UNSENT_BYTES = 64 << 20
"""Of values on their way to Redis. Beyond it responses are not kept: they would only fill the memory."""


class RedisCache(CacheStore):
    """Bytes by key in Redis. To be made on the event loop; connects by itself, and again where Redis was away."""

    def __init__(self, settings: RedisCacheSettings) -> None:
        self.usage = CacheUsage(size_bytes=None)
        self.max_value_bytes = settings.max_value_bytes
        self._ttl_s = settings.ttl_s
        self._unsent_bytes = 0
        self._client = Redis(connection_pool=_pool(settings))
        self._availability = Availability(self._client.ping, settings.address, self.usage, settings.retry_s)
        self._lookups: Lane[str, bytes | None] = Lane(
            self._get_many, None, self._availability, max_wait_s=settings.wait_timeout_s, width=settings.pool_size
        )
        self._insertions: Lane[tuple[str, bytes], bool] = Lane(
            self._set_many, False, self._availability, max_wait_s=settings.wait_timeout_s
        )

    @property
    def is_up(self) -> bool:
        """Whether it is worth asking."""
        return self._availability.is_up

    def answers(self, source: "ModelSource", statistics: ModelStatistics, run: Run) -> CachedAnswers:
        return RemoteAnswers(self, source, statistics, run)

    def find(self, key: str) -> "asyncio.Future[bytes | None]":
        """What is kept under `key`, b"" where nothing is; None where Redis did not say in time."""
        return self._lookups.put(key)

    def keep(self, key: str, value: bytes) -> "asyncio.Future[bool]":
        """Store it; False where that could not be done in time."""
        if self._unsent_bytes + len(value) > _MAX_UNSENT_BYTES:
            refused: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            refused.set_result(False)
            return refused
        self._unsent_bytes += len(value)
        kept = self._insertions.put((key, value))
        kept.add_done_callback(lambda _: self._was_sent(len(value)))
        return kept

    def _was_sent(self, size: int) -> None:
        self._unsent_bytes -= size

    async def _get_many(self, keys: list[str]) -> list[bytes | None]:
        begun = perf_counter_ns()
        values = await self._client.mget(keys)
        self.usage.lookup_ns += perf_counter_ns() - begun
        # Bytes, as the client decodes nothing; its types do not tell.
        return [cast(bytes, value or b"") for value in values]

    async def _set_many(self, pairs: list[tuple[str, bytes]]) -> list[bool]:
        begun = perf_counter_ns()
        pipeline = self._client.pipeline(transaction=False)
        for key, value in pairs:
            pipeline.set(key, value, ex=self._ttl_s)
        results = await pipeline.execute(raise_on_error=False)
        self.usage.insertion_ns += perf_counter_ns() - begun
        refusals = [result for result in results if isinstance(result, Exception)]
        if len(refusals) == len(results):
            raise refusals[0]
        return [not isinstance(result, Exception) for result in results]

    async def close(self) -> None:
        await self._availability.close()
        await asyncio.gather(self._lookups.close(), self._insertions.close())
        await self._client.aclose()
        await self._client.connection_pool.disconnect()


def _pool(settings: RedisCacheSettings) -> BlockingConnectionPool:
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "db": settings.db,
        "username": settings.user,
        "password": settings.password,
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.socket_timeout_s,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
    return BlockingConnectionPool(
        max_connections=settings.pool_size + 2,
        timeout=settings.wait_timeout_s,
        connection_class=Connection if settings.tls is None else SSLConnection,
        **options,
        **_tls_options(settings.tls),
    )


def _tls_options(tls: RedisTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.cert,
        "ssl_keyfile": tls.key,
        "ssl_ca_certs": tls.cacert,
        "ssl_ca_path": tls.cacert_dir,
    }
