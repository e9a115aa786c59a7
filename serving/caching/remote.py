"""A model's requests on their way past a cache in another process: they wait for it, and the event loop does not."""

import asyncio
import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from serving.caching.answers import CachedAnswers
from serving.caching.keys import Key, fingerprint, key_of
from serving.caching.packing import pack, unpack
from serving.caching.store import Run
from serving.job import InferJob
from serving.request import InferResponse
from serving.statistics import CacheUsage, ModelStatistics
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from serving.spec import ModelSource

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


class RemoteAnswers(CachedAnswers):
    """Until the model's files are read, of which the keys tell, and while the cache is away, the model runs all."""

    def __init__(self, store: ByteStore, source: "ModelSource", statistics: ModelStatistics, run: Run) -> None:
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
        key = key_of(job.request, b"")
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
