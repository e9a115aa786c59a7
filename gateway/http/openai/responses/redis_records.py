"""Records of responses in Redis."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.http.openai.responses.records import ABSENT, Record, RecordKey, StoreLimits, check_size
from sluice.pipelines.sqlite.connections import StoreUse

_TIMEOUT_S = 5.0
_TRIAL_S = 0.001
_COMPARE_AND_WRITE = """
if (tonumber(redis.call('HGET', KEYS[1], 'version')) or 0) ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[1] + 1, 'body', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


class RedisRecords:
    """Records in Redis, which gateways of several machines share. What bounds them all is Redis' own `maxmemory`."""

    def __init__(self, url: str, limits: StoreLimits) -> None:
        """Connects at the first use. Raises ValueError for a URL that is none of Redis."""
        self._limits = limits
        self._client = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._use = StoreUse(self._attempt)
        self._compare_and_write = self._client.register_script(_COMPARE_AND_WRITE)

    async def read(self, key: RecordKey) -> Record | None:
        with self._use.note("read"), _translate_errors():
            body, version = await self._client.hmget(_name(key), ["body", "version"])
        return None if body is None or version is None else Record(cast(bytes, body), int(version))

    async def write(self, key: RecordKey, body: bytes, version: int, ttl_s: float | None = None) -> bool:
        check_size(body, self._limits)
        ttl_ms = int((ttl_s or self._limits.ttl_s) * 1000)
        with self._use.note("write"), _translate_errors():
            return bool(await self._compare_and_write(keys=[_name(key)], args=[version, body, ttl_ms]))

    async def delete(self, key: RecordKey) -> bool:
        with self._use.note("write"), _translate_errors():
            return bool(await self._client.delete(_name(key)))

    def problem(self) -> str:
        return self._use.problem()

    async def _attempt(self) -> None:
        """Read and write what expires at once."""
        key = RecordKey("", "trial")
        await self.read(key)
        await self.write(key, b"", ABSENT, _TRIAL_S)

    async def close(self) -> None:
        self._use.close()
        await self._client.aclose()


def _name(key: RecordKey) -> str:
    return f"sluice:responses:{key.owner}:{key.id}"


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise SluiceError(ErrorCode.UNAVAILABLE, f"--responses-store cannot be used: {reason}") from error
