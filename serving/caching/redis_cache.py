"""The response cache in Redis (`--cache-config=redis`), which gateways share and which outlives them."""

import asyncio
import logging
from time import perf_counter_ns
from typing import Any, cast

import msgspec

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.caching.response_cache import Key, ModelCache, ResponseCache, RunJob, fingerprint, request_key
from sluice.serving.caching.settings import RedisCacheSettings, RedisTls
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse, Parameter
from sluice.serving.spec import ModelSource
from sluice.serving.statistics import CacheUsage, ModelStatistics
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Tensor
from sluice.state.outage import Outage, keep_trying
from sluice.state.redis import FAILURES, CommandBatcher, Pool, RedisClient, connect

_log = logging.getLogger(__name__)

_VALUE_PREFIX = "sluice:value:"
_MAX_FAILURES = 3
"""Failures in a row that count as an outage."""
_MAX_UNSENT_BYTES = 64 << 20
"""Limit on values on their way to Redis. Beyond it responses are not kept, as they would fill the memory."""


class RedisCache(ResponseCache):
    """Packed responses by key in Redis. To be made on the event loop; it connects by itself, again after an outage.

    It is no `Store`: records have versions, and each is asked for alone, which costs 50 us of processor time. Look-ups
    that come together share a command here and cost 6 us each.
    """

    def __init__(self, settings: RedisCacheSettings) -> None:
        self.usage = CacheUsage(size_bytes=None)
        self.max_value_bytes = settings.max_value_bytes
        self._ttl_s = settings.ttl_s
        self._unsent_bytes = 0
        self._client = _connect(settings)
        self._outage = _CacheOutage(settings.address, self.usage)
        trying = keep_trying(self._outage, self._client.ping, FAILURES, retry_s=settings.retry_s)
        self._trying = asyncio.create_task(trying, name="cache-availability")
        self._lookups: CommandBatcher[str, bytes | None] = CommandBatcher(
            self._get_many, None, self._outage, max_wait_s=settings.wait_timeout_s, width=settings.pool_size
        )
        self._insertions: CommandBatcher[tuple[str, bytes], bool] = CommandBatcher(
            self._set_many, False, self._outage, max_wait_s=settings.wait_timeout_s
        )

    @property
    def is_up(self) -> bool:
        return self._outage.is_up

    def for_model(self, source: ModelSource, statistics: ModelStatistics, run: RunJob) -> ModelCache:
        return _RedisModelCache(self, source, statistics, run)

    def find(self, key: str) -> "asyncio.Future[bytes | None]":
        """Return the value under `key`: b"" where there is none, None where Redis did not answer in time."""
        return self._lookups.put(key)

    def keep(self, key: str, value: bytes) -> "asyncio.Future[bool]":
        """Store a value. False where that could not be done in time."""
        if self._unsent_bytes + len(value) > _MAX_UNSENT_BYTES:
            rejected: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            rejected.set_result(False)
            return rejected
        self._unsent_bytes += len(value)
        kept = self._insertions.put((key, value))
        kept.add_done_callback(lambda _: self._was_sent(len(value)))
        return kept

    async def find_value(self, key: Key) -> bytes | None:
        if not self.is_up:
            self.usage.num_bypassed += 1
            return None
        value = await self.find(_VALUE_PREFIX + key.hex())
        if value:
            self.usage.num_hits += 1
        elif value is None:
            self.usage.num_bypassed += 1
        else:
            self.usage.num_misses += 1
        return value or None

    def keep_value(self, key: Key, value: bytes) -> bool:
        if not self.is_up or len(value) > self.max_value_bytes:
            return False
        self.keep(_VALUE_PREFIX + key.hex(), value)
        return True

    def _was_sent(self, size: int) -> None:
        self._unsent_bytes -= size

    async def _get_many(self, keys: list[str]) -> list[bytes | None]:
        started = perf_counter_ns()
        values = await self._client.mget(keys)
        self.usage.lookup_ns += perf_counter_ns() - started
        # The values are bytes, as the client decodes nothing, which its types do not say.
        return [cast(bytes, value or b"") for value in values]

    async def _set_many(self, pairs: list[tuple[str, bytes]]) -> list[bool]:
        started = perf_counter_ns()
        pipeline = self._client.pipeline(transaction=False)
        for key, value in pairs:
            pipeline.set(key, value, ex=self._ttl_s)
        results = await pipeline.execute(raise_on_error=False)
        self.usage.insertion_ns += perf_counter_ns() - started
        errors = [result for result in results if isinstance(result, Exception)]
        if len(errors) == len(results):
            raise errors[0]
        return [not isinstance(result, Exception) for result in results]

    async def close(self) -> None:
        self._outage.close()
        self.usage.is_up = False
        self._trying.cancel()
        await asyncio.wait((self._trying,))
        await asyncio.gather(self._lookups.close(), self._insertions.close())
        await self._client.aclose()


class _CacheOutage(Outage):
    """An outage of the cache, which its metrics show. A single slow answer is none."""

    def __init__(self, address: str, usage: CacheUsage) -> None:
        cache = f"the response cache at {address}"
        away = f"{cache} is not available, requests are served without it"
        super().__init__(away, f"{cache} answers again", tolerance=_MAX_FAILURES)
        self._usage = usage
        usage.is_up = False

    def failed(self, error: Exception) -> None:
        self._usage.num_errors += 1
        super().failed(error)
        self._usage.is_up = self.is_up

    def end(self) -> None:
        super().end()
        self._usage.is_up = True


def _connect(settings: RedisCacheSettings) -> RedisClient:
    scheme = "redis" if settings.tls is None else "rediss"
    return connect(
        f"{scheme}://{settings.address}/{settings.db}",
        settings.socket_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        pool=Pool(settings.pool_size + 2, settings.wait_timeout_s),
        username=settings.user,
        password=settings.password,
        **_tls_options(settings.tls),
    )


def _tls_options(tls: RedisTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.cacert, "ssl_ca_path": tls.cacert_dir}


class _RedisModelCache(ModelCache):
    """One model version's use of Redis. Jobs wait for a look-up, and the event loop does not.

    The model runs all requests until its files are hashed for the keys, and while Redis is away.
    """

    def __init__(self, cache: RedisCache, source: ModelSource, statistics: ModelStatistics, run: RunJob) -> None:
        super().__init__(statistics, cache.usage)
        self._cache = cache
        self._run = run
        self._looked_up: set[InferJob] = set()
        self._prefix: str | None = None
        self._hashing = asyncio.create_task(self._hash_files(source), name=f"fingerprint-{source.name}")

    async def _hash_files(self, source: ModelSource) -> None:
        try:
            files = await asyncio.to_thread(fingerprint, source)
        except OSError as error:
            _log.warning("responses of model '%s' are not cached: its files cannot be read: %s", source.name, error)
            return
        self._prefix = f"sluice:{source.name}:{source.version}:{files}:"

    @property
    def num_pending(self) -> int:
        return len(self._looked_up)

    def answer(self, job: InferJob) -> bool:
        if self._prefix is None or not self._cache.is_up:
            self._cache.usage.num_bypassed += 1
            return False
        started = perf_counter_ns()
        key = request_key(job.request, b"")
        lookup = self._cache.find(self._prefix + key.hex())
        self._looked_up.add(job)
        job.on_cancel = lambda: self._fail(job, SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
        lookup.add_done_callback(lambda found: self._handle_lookup(job, key, started, found.result()))
        return True

    def _fail(self, job: InferJob, error: SluiceError) -> None:
        self._looked_up.discard(job)
        job.on_cancel = None
        job.fail(error)

    def _handle_lookup(self, job: InferJob, key: Key, started: int, value: bytes | None) -> None:
        if job not in self._looked_up:
            return
        self._looked_up.remove(job)
        job.on_cancel = None
        usage, response = self._cache.usage, None if value is None else unpack(value)
        ended = perf_counter_ns()
        if response is not None:
            usage.num_hits += 1
            self._respond(job, response, started, ended)
            return
        if value is None:
            usage.num_bypassed += 1
        else:
            usage.num_misses += 1
            self._missed[job] = (key, ended - started)
        self._run_after_miss(job)

    def _run_after_miss(self, job: InferJob) -> None:
        """Run the job on the model. Its submission has returned, so a rejection fails the job."""
        try:
            self._run(job)
        except SluiceError as error:
            job.fail(error)
        except Exception:
            _log.exception("a request that was looked for in the response cache could not be run")
            job.fail(SluiceError(ErrorCode.INTERNAL, "the request could not be run"))

    def _keep(self, key: Key, lookup_ns: int, response: InferResponse) -> None:
        if not self._cache.is_up or sum(tensor.size_bytes for tensor in response.outputs) > self._cache.max_value_bytes:
            return
        started = perf_counter_ns()
        kept = self._cache.keep(f"{self._prefix}{key.hex()}", pack(response))
        kept.add_done_callback(lambda done: self._was_kept(done.result(), lookup_ns, started))

    def _was_kept(self, is_kept: bool, lookup_ns: int, started: int) -> None:
        if is_kept:
            self._statistics.record_cache_miss(lookup_ns + perf_counter_ns() - started, delays_request=False)

    def close(self, error: SluiceError) -> None:
        self._hashing.cancel()
        for job in list(self._looked_up):
            self._fail(job, error)


class _Output(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: memoryview


class _Packed(msgspec.Struct, array_like=True, tag="sluice-response-1"):
    """A packed response. The tag names the format and changes with it."""

    outputs: list[_Output]
    parameters: dict[str, Parameter]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def pack(response: InferResponse) -> bytes:
    """Return a response as MessagePack with tensors in the protocol's wire form. It is a copy."""
    outputs = [_Output(each.name, each.datatype, each.shape, memoryview(each.raw)) for each in response.outputs]
    return _encoder.encode(_Packed(outputs, response.parameters))


def unpack(value: bytes) -> InferResponse | None:
    """Return the response packed in `value`, where its tensors stay; None for an invalid value."""
    try:
        packed = _decoder.decode(value)
        return InferResponse([_tensor(each) for each in packed.outputs], packed.parameters)
    except (ValueError, RecursionError):
        return None


def _tensor(output: _Output) -> Tensor:
    if output.datatype not in DATA_TYPES or any(size < 0 for size in output.shape):
        raise ValueError(f"no tensor has type {output.datatype} and shape {output.shape}")
    tensor = Tensor(output.name, output.datatype, output.shape, output.raw)
    tensor.check_size()
    return tensor
