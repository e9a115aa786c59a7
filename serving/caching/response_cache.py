"""The response cache: its interface, the one in this process's memory, and the keys of requests.

It is no `Store` (`sluice/state`): records there are bytes with versions, asked for in a coroutine. A hit in memory
would be unpacked each time, 3.6 us of processor time against 0.4, and only a task could wait for it, where `answer`
returns at once. Nor does a store keep within a number of bytes what was used last. `RedisCache` says why it is none in
Redis.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from hashlib import blake2b, file_digest
from itertools import count
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.statistics import CacheUsage, ModelStatistics
from sluice.serving.tensors.tensor import Tensor

Key = bytes
"""Identifies a request's response."""

_NOT_IN_RESPONSES = (
    "dynamic_batching",
    "instance_group",
    "metric_tags",
    "model_metrics",
    "model_warmup",
    "response_cache",
    "version_policy",
)
"""Fields in which servers that share a cache may differ: they do not change responses."""
OWN_SIZE_BYTES = 16 << 20
"""Size of a model's own cache."""
_ENTRY_BYTES = 1024
"""Approximate size of an entry without its tensors."""

RunJob = Callable[[InferJob], None]
"""Runs a job on its model. Raises SluiceError where it is rejected."""


class ResponseCache(ABC):
    """Responses by key, for all models of a server. Event loop's thread only."""

    usage: CacheUsage

    @abstractmethod
    def for_model(self, source: ModelSource, statistics: ModelStatistics, run: RunJob) -> "ModelCache":
        """Return the cache of one model version. A version loaded from other files finds nothing of the last one."""

    @abstractmethod
    async def find_value(self, key: Key) -> bytes | None:
        """Return the value that `keep_value` kept under `key`; None where there is none, or no answer in time."""

    @abstractmethod
    def keep_value(self, key: Key, value: bytes) -> bool:
        """Keep a value of another kind than responses. Returns False where it is there already or too large."""

    @abstractmethod
    async def close(self) -> None:
        """Free its memory and connections. To be called last, by the caller that opened it. Idempotent."""


class ModelCache(ABC):
    """One model version's use of the cache: it answers requests, keeps responses, and counts both as Triton does."""

    def __init__(self, statistics: ModelStatistics, usage: CacheUsage) -> None:
        self._statistics = statistics
        self._missed: dict[InferJob, tuple[Key, int]] = {}
        """Key and look-up time of each request that the model runs."""
        self._hits: set[InferJob] = set()
        statistics.cache = usage

    @abstractmethod
    def answer(self, job: InferJob) -> bool:
        """Take a job, which is then answered or run later. False where the model must run it now."""

    def keep(self, job: InferJob, response: InferResponse) -> None:
        """Keep a response of the model, where it may be kept."""
        missed = self._missed.get(job)
        if missed is not None and response.error is None and response.is_final:
            self._keep(*missed, response)

    @abstractmethod
    def _keep(self, key: Key, lookup_ns: int, response: InferResponse) -> None:
        """Keep a copy under `key`, whose look-up took `lookup_ns`."""

    def _respond(self, job: InferJob, response: InferResponse, started_ns: int, ended_ns: int) -> None:
        self._hits.add(job)
        self._statistics.record_cache_hit(job, started_ns, ended_ns)
        job.respond(response)

    def finished(self, job: InferJob) -> bool:
        """Note the end of a job. Returns whether the cache answered it, which is counted already."""
        self._missed.pop(job, None)
        if job not in self._hits:
            return False
        self._hits.remove(job)
        return True

    def forget(self, job: InferJob) -> None:
        """Drop a job that the queue rejected."""
        self._missed.pop(job, None)

    @property
    def num_pending(self) -> int:
        """Number of jobs that were taken and wait for the cache."""
        return 0

    def close(self, error: SluiceError) -> None:  # noqa: B027 - most hold nothing
        """End the jobs that were taken in `error`: the model is closed."""


class LocalCache(ResponseCache):
    """Up to `size_bytes` of responses in this process's memory; the least recently used one is evicted first."""

    def __init__(self, size_bytes: int = OWN_SIZE_BYTES) -> None:
        self.usage = CacheUsage(size_bytes)
        self._size_bytes = size_bytes
        self._entries: OrderedDict[Key, tuple[int, InferResponse]] = OrderedDict()
        self._serials = count()

    def for_model(self, source: ModelSource, statistics: ModelStatistics, run: RunJob) -> ModelCache:
        # A number of its own keeps a version that was loaded from other files from the last one's responses.
        scope = f"{source.name}:{source.version}:{next(self._serials)}".encode()
        return _LocalModelCache(self, scope, statistics)

    def find(self, key: Key) -> InferResponse | None:
        found = self._entries.get(key)
        if found is None:
            self.usage.num_misses += 1
            return None
        self._entries.move_to_end(key)
        self.usage.num_hits += 1
        response = found[1]
        # A copy that its receiver may change, all but the tensors.
        return InferResponse(list(response.outputs), dict(response.parameters))

    def keep(self, key: Key, response: InferResponse) -> bool:
        """Keep a copy. False where it is there already, or larger than the whole cache."""
        usage = self.usage
        size = _ENTRY_BYTES + sum(tensor.size_bytes for tensor in response.outputs)
        if key in self._entries or size > self._size_bytes:
            return False
        started = perf_counter_ns()
        while usage.used_bytes + size > self._size_bytes:
            dropped, _ = self._entries.popitem(last=False)[1]
            usage.used_bytes -= dropped
            usage.num_evictions += 1
        self._entries[key] = (size, _copy_tensors(response))
        usage.used_bytes += size
        usage.num_entries = len(self._entries)
        usage.insertion_ns += perf_counter_ns() - started
        return True

    async def find_value(self, key: Key) -> bytes | None:
        started = perf_counter_ns()
        found = self.find(key)
        self.usage.lookup_ns += perf_counter_ns() - started
        return None if found is None else bytes(found.outputs[0].raw)

    def keep_value(self, key: Key, value: bytes) -> bool:
        return self.keep(key, InferResponse([Tensor("value", "UINT8", (len(value),), value)]))

    async def close(self) -> None:
        self._entries.clear()
        self.usage.used_bytes = self.usage.num_entries = 0


class _LocalModelCache(ModelCache):
    """A model version's use of a local cache, without a wait."""

    def __init__(self, cache: LocalCache, scope: bytes, statistics: ModelStatistics) -> None:
        super().__init__(statistics, cache.usage)
        self._cache = cache
        self._scope = scope

    def answer(self, job: InferJob) -> bool:
        started = perf_counter_ns()
        key = request_key(job.request, self._scope)
        response = self._cache.find(key)
        ended = perf_counter_ns()
        self._cache.usage.lookup_ns += ended - started
        if response is None:
            self._missed[job] = (key, ended - started)
            return False
        self._respond(job, response, started, ended)
        return True

    def _keep(self, key: Key, lookup_ns: int, response: InferResponse) -> None:
        started = perf_counter_ns()
        if self._cache.keep(key, response):
            self._statistics.record_cache_miss(lookup_ns + perf_counter_ns() - started)


def _copy_tensors(response: InferResponse) -> InferResponse:
    """Return a copy with tensors of its own: a backend may use the memory of the original again."""
    outputs = [Tensor(each.name, each.datatype, each.shape, bytes(each.raw)) for each in response.outputs]
    return InferResponse(outputs, dict(response.parameters))


def open_model_cache(
    source: ModelSource, statistics: ModelStatistics, cache: ResponseCache | None, run: RunJob
) -> ModelCache | None:
    """Return the cache of a model that has one: `cache`'s, or one of its own; else None."""
    if not is_cached(source.config):
        return None
    return (cache or LocalCache()).for_model(source, statistics, run)


def is_cached(config: ModelConfig) -> bool:
    """Return whether the model's responses are cached. Those of decoupled and sequence models never are."""
    is_plain = not config.model_transaction_policy.decoupled and not config.HasField("sequence_batching")
    return bool(config.response_cache.enable) and is_plain


def request_key(request: InferRequest, scope: bytes) -> Key:
    """Return a key, equal for equal inputs, outputs and parameters in any order to the model of `scope`."""
    digest = blake2b(scope, digest_size=16)
    if request.requested_outputs or request.parameters:
        digest.update(repr((sorted(request.requested_outputs), sorted(request.parameters.items()))).encode())
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        # Names and lengths are included, so that no two different requests hash the same bytes.
        digest.update(repr((name, tensor.datatype, tensor.shape, tensor.size_bytes)).encode())
        digest.update(tensor.raw)
    return digest.digest()


def fingerprint(source: ModelSource) -> str:
    """Return a hash of the files and fields that determine responses. Reads files: for a thread. Raises OSError."""
    digest = blake2b(_response_fields(source.config), digest_size=8)
    files = (path for path in source.version_folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in sorted(files):
        with path.open("rb") as file:
            content = file_digest(file, "blake2b").digest()
        digest.update(repr((str(path.relative_to(source.version_folder)), content)).encode())
    return digest.hexdigest()


def _response_fields(config: ModelConfig) -> bytes:
    kept = deepcopy(config)
    for field in _NOT_IN_RESPONSES:
        kept.ClearField(field)
    return bytes(kept.SerializeToString(deterministic=True))
