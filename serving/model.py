"""What every protocol calls: a model version, whatever runs behind it."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.check import check_request
from serving.job import Job, Receive
from serving.request import InferRequest, InferResponse
from serving.spec import ModelSpec
from serving.statistics import ModelStatistics
from sluice.errors import ErrorCode, SluiceError

_NOTHING_ASKED = InferRequest(inputs={})


class Model(ABC):
    """One version of one model, loaded. Everything happens on the event loop's thread."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, labels: Mapping[str, Sequence[str]] | None = None) -> None:
        """`labels` of outputs that have a label file, by output name."""
        self.config = config
        self.spec = spec
        self.labels = dict(labels or {})
        self.statistics = ModelStatistics()
        self.created = int(time.time())
        """When it was loaded, in seconds since 1970."""
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closing = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def version(self) -> int:
        return self.spec.version

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served now: false while what runs it is being restarted, or is lost."""
        return not self._is_closing

    @property
    def is_lost(self) -> bool:
        """Whether what runs it is given up: it will serve again only when it is loaded again."""
        return False

    def is_decoupled_for(self, request: InferRequest) -> bool:
        """Whether `request` may get other than one response. An LLM gives one unless it is asked to stream."""
        return self.spec.is_decoupled

    @property
    def streams_unasked(self) -> bool:
        """Whether even a request that does not ask for a stream may get other than one response."""
        return self.is_decoupled_for(_NOTHING_ASKED)

    def submit(self, request: InferRequest, receive: Receive) -> Job:
        """Begin `request`; `receive` gets its responses, possibly before this returns.

        Raises SluiceError for what is refused before it begins: INVALID in Triton's words for a request that does not
        fit the model, OVERLOADED for a full queue, UNAVAILABLE for a model that is going away.
        """
        self._refuse_if_closing()
        return self.submit_held(request, receive)

    def submit_held(self, request: InferRequest, receive: Receive) -> Job:
        """The same for who holds the model, also while it is going away."""
        check_request(request, self.spec)
        job = Job(self, request, receive)
        self._enter()
        try:
            self._start(job)
        except BaseException as error:
            self._refused(job, error)
            raise
        return job

    def refuse_if_full(self) -> None:  # noqa: B027 - what has no queue is never full
        """Raises OVERLOADED where a request would be refused now: told before the steps that lead to it have run."""

    def hold(self) -> None:
        """Keep it from being closed until `release`: what is under way in an ensemble must find its next steps.

        Raises UNAVAILABLE for a model that is going away.
        """
        self._refuse_if_closing()
        self._enter()

    def release(self) -> None:
        """The end of one `hold`."""
        self._leave()

    @abstractmethod
    def _start(self, job: Job) -> None:
        """Take a checked job: queue it or run it. Raises SluiceError where it is refused; never blocks."""

    def responded(self, job: Job, response: InferResponse) -> None:
        """Called by the job with each response that it passes on."""
        if self.spec.is_decoupled:
            self.statistics.record_response(job, response)

    def finished(self, job: Job) -> None:
        """Called by the job, once, when it is over."""
        self.statistics.record_request(job)
        self._leave()

    def _refused(self, job: Job, error: BaseException) -> None:
        job.is_finished = True
        if isinstance(error, SluiceError):
            job.outcome = error
            if error.code is not ErrorCode.INVALID:  # like Triton, a request that makes no sense is not counted at all
                self.statistics.record_refused(job)
        self._leave()

    def _refuse_if_closing(self) -> None:
        if self._is_closing:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.version} is being unloaded")

    def retire(self) -> None:
        """Take nothing new from now on."""
        self._is_closing = True

    @property
    def is_retired(self) -> bool:
        """Whether it takes nothing new: another version may have taken its place."""
        return self._is_closing

    def _enter(self) -> None:
        self._num_in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._idle.set()

    def claim_resources(self) -> None:  # noqa: B027 - what has no instances needs nothing
        """Claim its share of what the server limits; called once, before the version is ready.

        Raises SluiceError INVALID where it could never get what it needs.
        """

    async def warm_up(self, request: InferRequest) -> None:
        """Run `request` once on everything that would run such ones, without a trace in the statistics.

        Called before the version is ready. Raises SluiceError with what the model says.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive(response: InferResponse) -> None:
            if ended.done():
                return
            if response.error is not None:
                ended.set_exception(response.error)
            elif response.is_final:
                ended.set_result(None)

        kept, self.statistics = self.statistics, ModelStatistics()
        try:
            job = self.submit(request, receive)
            try:
                await ended
            finally:
                job.cancel()
        finally:
            self.statistics = kept

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._num_in_flight == 0

    async def wait_idle(self) -> None:
        """Until nothing is under way."""
        await self._idle.wait()

    async def unload(self, timeout_s: float | None = None) -> None:
        """Take nothing new, let what is under way end for up to `timeout_s`, and free everything."""
        self.retire()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
        except TimeoutError:
            pass
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Free what it holds now; jobs under way end in an error. Idempotent."""
