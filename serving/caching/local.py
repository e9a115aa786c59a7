"""The cache in this process's memory (`--cache-config=local`, and of a model whose server has no cache)."""

from collections import OrderedDict
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING

from serving.caching.answers import CachedAnswers
from serving.caching.keys import Key, key_of
from serving.caching.store import CacheStore, Run
from serving.job import InferJob
from serving.request import InferResponse
from serving.statistics import CacheUsage, ModelStatistics
from serving.tensors.tensor import Tensor

if TYPE_CHECKING:
    from serving.spec import ModelSource

OWN_SIZE_BYTES = 16 << 20
"""Of a model that has a cache to itself."""
_ENTRY_BYTES = 1024
"""About what an entry takes besides its tensors."""


class LocalCache(CacheStore):
    """Up to `size_bytes` of responses, the least recently used one dropped first."""

    def __init__(self, size_bytes: int = OWN_SIZE_BYTES) -> None:
        self.usage = CacheUsage(size_bytes)
        self._size_bytes = size_bytes
        self._entries: OrderedDict[Key, tuple[int, InferResponse]] = OrderedDict()
        self._serials = count()

    def answers(self, source: "ModelSource", statistics: ModelStatistics, run: Run) -> CachedAnswers:
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


class _LocalAnswers(CachedAnswers):
    """Everything happens at once."""

    def __init__(self, cache: LocalCache, scope: bytes, statistics: ModelStatistics) -> None:
        super().__init__(statistics, cache.usage)
        self._cache = cache
        self._scope = scope

    def answer(self, job: InferJob) -> bool:
        begun = perf_counter_ns()
        key = key_of(job.request, self._scope)
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
