"""The cache in a Redis server (`--cache-config=redis`), which gateways share and which outlives them."""

import asyncio
import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from serving.caching.redis_commands import Availability, CommandBatcher
from serving.caching.response_cache import Key, ModelCache, ResponseCache, RunJob, fingerprint, request_key
from serving.caching.settings import RedisCacheSettings, RedisTls
from serving.job import InferJob
from serving.request import InferResponse, Parameter
from serving.statistics import CacheUsage, ModelStatistics
from serving.tensors.datatypes import DATA_TYPES
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from serving.spec import ModelSource


class _Output(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: memoryview


class _Packed(msgspec.Struct, array_like=True, tag="sluice-response-1"):
    """The tag is the format's name: a change of the format takes another."""

    outputs: list[_Output]
    parameters: dict[str, Parameter]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def pack(response: InferResponse) -> bytes:
    """A copy: what it was made from may change."""
    outputs = [_Output(each.name, each.datatype, each.shape, memoryview(each.raw)) for each in response.outputs]
    return _encoder.encode(_Packed(outputs, response.parameters))


def unpack(value: bytes) -> InferResponse | None:
    """The response whose tensors lie in `value`; None for what is none."""
    try:
        packed = _decoder.decode(value)
        return InferResponse([_tensor(each) for each in packed.outputs], packed.parameters)
    except (msgspec.MsgspecError, ValueError):
        return None


def _tensor(output: _Output) -> Tensor:
    if output.datatype not in DATA_TYPES or any(size < 0 for size in output.shape):
        raise ValueError(f"no tensor has type {output.datatype} and shape {output.shape}")
    tensor = Tensor(output.name, output.datatype, output.shape, output.raw)
    tensor.check_size()
    return tensor


_log = logging.getLogger(__name__)


class ByteStore(Protocol):
    """A cache of bytes: what is asked of Redis."""

    usage: CacheUsage
    max_value_bytes: int

    @property
    def is_up(self) -> bool: ...
    def find(self, key: str) -> "asyncio.Future[bytes | None]":
        """b"" where nothing is kept, None where that cannot be told."""
        ...

    def keep(self, key: str, value: bytes) -> "asyncio.Future[bool]": ...


class RemoteAnswers(ModelCache):
    """Until the model's files are read, of which the keys tell, and while the cache is away, the model runs all."""

    def __init__(self, store: ByteStore, source: "ModelSource", statistics: ModelStatistics, run: RunJob) -> None:
        super().__init__(statistics, store.usage)
        self._store = store
        self._run = run
        self._looking: set[InferJob] = set()
        self._prefix: str | None = None
        self._reading = asyncio.create_task(self._read(source), name=f"fingerprint-{source.name}")

    async def _read(self, source: "ModelSource") -> None:
        try:
            files = await asyncio.to_thread(fingerprint, source)
        except OSError as error:
            _log.warning("responses of model '%s' are not cached: its files cannot be read: %s", source.name, error)
            return
        self._prefix = f"sluice:{source.name}:{source.version}:{files}:"

    @property
    def num_pending(self) -> int:
        return len(self._looking)

    def answer(self, job: InferJob) -> bool:
        if self._prefix is None or not self._store.is_up:
            self._store.usage.num_bypassed += 1
            return False
        begun = perf_counter_ns()
        key = request_key(job.request, b"")
        lookup = self._store.find(self._prefix + key.hex())
        self._looking.add(job)
        job.on_cancel = lambda: self._give_up(job, SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
        lookup.add_done_callback(lambda found: self._found(job, key, begun, found.result()))
        return True

    def _give_up(self, job: InferJob, error: SluiceError) -> None:
        self._looking.discard(job)
        job.on_cancel = None
        job.fail(error)

    def _found(self, job: InferJob, key: Key, begun: int, value: bytes | None) -> None:
        if job not in self._looking:
            return
        self._looking.remove(job)
        job.on_cancel = None
        usage, response = self._store.usage, None if value is None else unpack(value)
        ended = perf_counter_ns()
        if response is not None:
            usage.num_hits += 1
            self._respond(job, response, begun, ended)
            return
        if value is None:
            usage.num_bypassed += 1
        else:
            usage.num_misses += 1
            self._missed[job] = (key, ended - begun)
        self._run_late(job)

    def _run_late(self, job: InferJob) -> None:
        """Nobody is there to be told of a refusal but the job itself."""
        try:
            self._run(job)
        except SluiceError as error:
            job.fail(error)
        except Exception:
            _log.exception("a request that was looked for in the response cache could not be run")
            job.fail(SluiceError(ErrorCode.INTERNAL, "the request could not be run"))

    def _keep(self, key: Key, lookup_ns: int, response: InferResponse) -> None:
        if not self._store.is_up or sum(tensor.size_bytes for tensor in response.outputs) > self._store.max_value_bytes:
            return
        begun = perf_counter_ns()
        kept = self._store.keep(f"{self._prefix}{key.hex()}", pack(response))
        kept.add_done_callback(lambda done: self._was_kept(done.result(), lookup_ns, begun))

    def _was_kept(self, is_kept: bool, lookup_ns: int, begun: int) -> None:
        if is_kept:
            self._statistics.record_cache_miss(lookup_ns + perf_counter_ns() - begun, delays_request=False)

    def close(self, error: SluiceError) -> None:
        self._reading.cancel()
        for job in list(self._looking):
            self._give_up(job, error)


_MAX_UNSENT_BYTES = 64 << 20
"""Of values on their way to Redis. Beyond it responses are not kept: they would only fill the memory."""


class RedisCache(ResponseCache):
    """Bytes by key in Redis. To be made on the event loop; connects by itself, and again where Redis was away."""

    def __init__(self, settings: RedisCacheSettings) -> None:
        self.usage = CacheUsage(size_bytes=None)
        self.max_value_bytes = settings.max_value_bytes
        self._ttl_s = settings.ttl_s
        self._unsent_bytes = 0
        self._client = Redis(connection_pool=_pool(settings))
        self._availability = Availability(self._client.ping, settings.address, self.usage, settings.retry_s)
        self._lookups: CommandBatcher[str, bytes | None] = CommandBatcher(
            self._get_many, None, self._availability, max_wait_s=settings.wait_timeout_s, width=settings.pool_size
        )
        self._insertions: CommandBatcher[tuple[str, bytes], bool] = CommandBatcher(
            self._set_many, False, self._availability, max_wait_s=settings.wait_timeout_s
        )

    @property
    def is_up(self) -> bool:
        """Whether it is worth asking."""
        return self._availability.is_up

    def answers(self, source: "ModelSource", statistics: ModelStatistics, run: RunJob) -> ModelCache:
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
