"""A model's requests on their way past its response cache."""

from time import perf_counter_ns

from pipelines.batching.cache import Key, ResponseCache
from pipelines.inference.job import Job
from pipelines.inference.statistics import ModelStatistics
from pipelines.inference.types import InferResponse


class CachedAnswers:
    """Answers what the cache knows, and keeps what the model answers to the rest. Counts both as Triton does."""

    def __init__(self, statistics: ModelStatistics) -> None:
        self._cache = ResponseCache()
        self._statistics = statistics
        self._missed: dict[Job, tuple[Key, int]] = {}
        """Of requests that the model runs: where to keep the answer, and how long it took to look for it."""
        self._hits: set[Job] = set()
        statistics.cache = self._cache.usage

    def answer(self, job: Job) -> bool:
        """Answer out of the cache; False where the model has to."""
        begun = perf_counter_ns()
        key, response = self._cache.find(job.request)
        ended = perf_counter_ns()
        if response is None:
            self._missed[job] = (key, ended - begun)
            return False
        self._hits.add(job)
        self._statistics.record_cache_hit(job, begun, ended)
        job.respond(response)
        return True

    def keep(self, job: Job, response: InferResponse) -> None:
        """The model has answered."""
        missed = self._missed.get(job)
        if missed is None or response.error is not None or not response.is_final:
            return
        key, lookup_ns = missed
        begun = perf_counter_ns()
        if self._cache.keep(key, response):
            self._statistics.record_cache_miss(lookup_ns + perf_counter_ns() - begun)

    def finished(self, job: Job) -> bool:
        """Whether the request was answered here, and is counted already."""
        self._missed.pop(job, None)
        if job not in self._hits:
            return False
        self._hits.remove(job)
        return True

    def forget(self, job: Job) -> None:
        """It was refused by the queue."""
        self._missed.pop(job, None)
