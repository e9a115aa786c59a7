"""A model's requests on their way past the response cache."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b, file_digest
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.job import InferJob
from serving.request import InferRequest, InferResponse
from serving.statistics import CacheUsage, ModelStatistics
from serving.tensors.tensor import Tensor
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from serving.spec import ModelSource


Key = bytes

_NOT_IN_RESPONSES = (
    "dynamic_batching",
    "instance_group",
    "metric_tags",
    "model_metrics",
    "model_warmup",
    "response_cache",
    "version_policy",
)
"""Fields by which servers that share a cache may differ: what a model answers is the same."""


def request_key(request: InferRequest, scope: bytes) -> Key:
    """Equal for requests that ask the model of `scope` for the same outputs of the same inputs, in whatever order.

    Custom parameters count, too, as a model may read them.
    """
    digest = blake2b(scope, digest_size=16)
    if request.requested_outputs or request.parameters:
        digest.update(repr((sorted(request.requested_outputs), sorted(request.parameters.items()))).encode())
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        # Lengths and names are spelled out, so that no two different requests hash the same bytes.
        digest.update(repr((name, tensor.datatype, tensor.shape, tensor.size_bytes)).encode())
        digest.update(tensor.raw)
    return digest.digest()


def fingerprint(source: "ModelSource") -> str:
    """The same wherever the same files are served with a configuration that computes the same, else another.

    Reads the whole version folder: not for the event loop's thread. Raises OSError where it is gone.
    """
    digest = blake2b(_deciding(source.config), digest_size=8)
    for path in _files(source.version_folder):
        with path.open("rb") as file:
            content = file_digest(file, "blake2b").digest()
        digest.update(repr((str(path.relative_to(source.version_folder)), content)).encode())
    return digest.hexdigest()


def _deciding(config: ModelConfig) -> bytes:
    kept = ModelConfig()
    kept.CopyFrom(config)
    for field in _NOT_IN_RESPONSES:
        kept.ClearField(field)
    return bytes(kept.SerializeToString(deterministic=True))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


class ModelCache(ABC):
    """Answers what the cache knows, and keeps what the model answers to the rest. Counts both as Triton does."""

    def __init__(self, statistics: ModelStatistics, usage: CacheUsage) -> None:
        self._statistics = statistics
        self._missed: dict[InferJob, tuple[Key, int]] = {}
        """Of requests that the model runs: where to keep the answer, and how long it took to look for it."""
        self._hits: set[InferJob] = set()
        statistics.cache = usage

    @abstractmethod
    def answer(self, job: InferJob) -> bool:
        """Take a job; False where the model has to run it now. What is taken is answered, or run later."""

    def keep(self, job: InferJob, response: InferResponse) -> None:
        """The model has answered."""
        missed = self._missed.get(job)
        if missed is not None and response.error is None and response.is_final:
            self._keep(*missed, response)

    @abstractmethod
    def _keep(self, key: Key, lookup_ns: int, response: InferResponse) -> None:
        """Keep a copy under `key`, which took so long to look for."""

    def _respond(self, job: InferJob, response: InferResponse, begun_ns: int, ended_ns: int) -> None:
        self._hits.add(job)
        self._statistics.record_cache_hit(job, begun_ns, ended_ns)
        job.respond(response)

    def finished(self, job: InferJob) -> bool:
        """Whether the request was answered here, and is counted already."""
        self._missed.pop(job, None)
        if job not in self._hits:
            return False
        self._hits.remove(job)
        return True

    def forget(self, job: InferJob) -> None:
        """It was refused by the queue."""
        self._missed.pop(job, None)

    @property
    def num_pending(self) -> int:
        """Jobs that were taken and wait for the cache."""
        return 0

    def close(self, error: SluiceError) -> None:  # noqa: B027 - most hold nothing
        """The model goes: jobs that were taken end in `error`."""


def is_cached(config: ModelConfig) -> bool:
    """Whether equal requests get equal responses: a stream is not kept, and a sequence has a state."""
    is_plain = not config.model_transaction_policy.decoupled and not config.HasField("sequence_batching")
    return bool(config.response_cache.enable) and is_plain


RunJob = Callable[[InferJob], None]
"""Has the model run a job. Raises SluiceError where it is refused."""


class ResponseCache(ABC):
    """Responses by key, shared by the models of a server. Event loop's thread only."""

    usage: CacheUsage

    @abstractmethod
    def answers(self, source: "ModelSource", statistics: ModelStatistics, run: RunJob) -> "ModelCache":
        """What stands before one model version. A version that is loaded again finds nothing of other files."""

    @abstractmethod
    async def close(self) -> None:
        """Free its connections; from now on it knows nothing. To be called by who opened it, last. Idempotent."""


OWN_SIZE_BYTES = 16 << 20
"""Of a model that has a cache to itself."""
_ENTRY_BYTES = 1024
"""About what an entry takes besides its tensors."""


class LocalCache(ResponseCache):
    """Up to `size_bytes` of responses, the least recently used one dropped first."""

    def __init__(self, size_bytes: int = OWN_SIZE_BYTES) -> None:
        self.usage = CacheUsage(size_bytes)
        self._size_bytes = size_bytes
        self._entries: OrderedDict[Key, tuple[int, InferResponse]] = OrderedDict()
        self._serials = count()

    def answers(self, source: "ModelSource", statistics: ModelStatistics, run: RunJob) -> ModelCache:
        # Numbered, so that a version loaded again from other files gets none of what the last one said.
        scope = f"{source.name}:{source.version}:{next(self._serials)}".encode()
        return _LocalAnswers(self, scope, statistics)

    def find(self, key: Key) -> InferResponse | None:
        """What is kept under `key`."""
        found = self._entries.get(key)
        if found is None:
            self.usage.num_misses += 1
            return None
        self._entries.move_to_end(key)
        self.usage.num_hits += 1
        return _copied(found[1])

    def keep(self, key: Key, response: InferResponse) -> bool:
        """Store a copy. False where it is there already, or larger than the whole cache."""
        usage = self.usage
        size = _ENTRY_BYTES + sum(tensor.size_bytes for tensor in response.outputs)
        if key in self._entries or size > self._size_bytes:
            return False
        begun = perf_counter_ns()
        while usage.used_bytes + size > self._size_bytes:
            dropped, _ = self._entries.popitem(last=False)[1]
            usage.used_bytes -= dropped
            usage.num_evictions += 1
        self._entries[key] = (size, _owned(response))
        usage.used_bytes += size
        usage.num_entries = len(self._entries)
        usage.insertion_ns += perf_counter_ns() - begun
        return True

    async def close(self) -> None:
        self._entries.clear()
        self.usage.used_bytes = self.usage.num_entries = 0


class _LocalAnswers(ModelCache):
    """Everything happens at once."""

    def __init__(self, cache: LocalCache, scope: bytes, statistics: ModelStatistics) -> None:
        super().__init__(statistics, cache.usage)
        self._cache = cache
        self._scope = scope

    def answer(self, job: InferJob) -> bool:
        begun = perf_counter_ns()
        key = request_key(job.request, self._scope)
        response = self._cache.find(key)
        ended = perf_counter_ns()
        self._cache.usage.lookup_ns += ended - begun
        if response is None:
            self._missed[job] = (key, ended - begun)
            return False
        self._respond(job, response, begun, ended)
        return True

    def _keep(self, key: Key, lookup_ns: int, response: InferResponse) -> None:
        begun = perf_counter_ns()
        if self._cache.keep(key, response):
            self._statistics.record_cache_miss(lookup_ns + perf_counter_ns() - begun)


def _copied(response: InferResponse) -> InferResponse:
    """For one more client: who gets it may change everything but the tensors."""
    return InferResponse(list(response.outputs), dict(response.parameters))


def _owned(response: InferResponse) -> InferResponse:
    """With tensors that stay what they are: a backend's may lie in memory that it uses again."""
    outputs = [Tensor(each.name, each.datatype, each.shape, bytes(each.raw)) for each in response.outputs]
    return InferResponse(outputs, dict(response.parameters))


def open_model_cache(
    source: "ModelSource", statistics: ModelStatistics, store: ResponseCache | None, run: RunJob
) -> ModelCache | None:
    """What stands before a model that asks for a cache, out of `store` or a memory of its own; else None."""
    if not is_cached(source.config):
        return None
    return (store or LocalCache()).answers(source, statistics, run)
