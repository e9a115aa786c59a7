"""A model's requests on their way past the response cache."""

from abc import ABC, abstractmethod

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.caching.keys import Key
from serving.job import InferJob
from serving.request import InferResponse
from serving.statistics import CacheUsage, ModelStatistics
from sluice.errors import SluiceError


class CachedAnswers(ABC):
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
