"""What every protocol calls: a model version, whatever runs behind it."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.job import InferJob, ReceiveResponse
from serving.request import InferRequest, InferResponse
from serving.request_check import check_request
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

    def submit(self, request: InferRequest, receive: ReceiveResponse) -> InferJob:
        """Begin `request`; `receive` gets its responses, possibly before this returns.

        Raises SluiceError for what is refused before it begins: INVALID in Triton's words for a request that does not
        fit the model, OVERLOADED for a full queue, UNAVAILABLE for a model that is going away.
        """
        self._refuse_if_closing()
        return self.submit_held(request, receive)

    def submit_held(self, request: InferRequest, receive: ReceiveResponse) -> InferJob:
        """The same for who holds the model, also while it is going away."""
        check_request(request, self.spec)
        job = InferJob(self, request, receive)
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
    def _start(self, job: InferJob) -> None:
        """Take a checked job: queue it or run it. Raises SluiceError where it is refused; never blocks."""

    def responded(self, job: InferJob, response: InferResponse) -> None:
        """Called by the job with each response that it passes on."""
        if self.spec.is_decoupled:
            self.statistics.record_response(job, response)

    def finished(self, job: InferJob) -> None:
        """Called by the job, once, when it is over."""
        self.statistics.record_request(job)
        self._leave()

    def _refused(self, job: InferJob, error: BaseException) -> None:
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


MAX_UNREAD = 16_384
"""Responses that a stream's reader may be behind; one further behind is cancelled, as it would only fill the memory."""


async def infer_one(model: Model, request: InferRequest) -> InferResponse:
    """The one response of a model that is not decoupled. Raises its error. Cancelling the task cancels the request."""
    future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def receive(response: InferResponse) -> None:
        if not future.done():
            future.set_result(response)

    job = model.submit(request, receive)
    try:
        response = await future
    except asyncio.CancelledError:
        job.cancel()
        raise
    if response.error is not None:
        raise response.error
    return response


class ResponseStream:
    """The responses of one request, as they come. The last one is final and may be empty."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        """Submits; raises what `Model.submit` raises."""
        self._unread: deque[InferResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._job: InferJob | None = None
        self._is_too_slow = False
        self._job = model.submit(request, self._receive)

    def _receive(self, response: InferResponse) -> None:
        self._unread.append(response)
        if len(self._unread) > MAX_UNREAD and self._job is not None:
            self._is_too_slow = True
            self._job.cancel()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> list[InferResponse]:
        """Everything that has come and was not taken yet; does not wait."""
        taken = list(self._unread)
        self._unread.clear()
        return taken

    async def wait(self) -> list[InferResponse]:
        """At least one response. Not to be called after the final one was taken."""
        if not self._unread:
            if self._is_too_slow:
                raise SluiceError(ErrorCode.OVERLOADED, f"the client fell {MAX_UNREAD} responses behind")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def cancel(self) -> None:
        """Want no more of it. Idempotent, and harmless after the end."""
        if self._job is not None:
            self._job.cancel()


async def infer_stream(model: Model, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    """Each response of any model, the last one final. Closing the generator cancels the request."""
    stream = ResponseStream(model, request)
    try:
        while True:
            for response in await stream.wait():
                yield response
                if response.is_final:
                    return
    finally:
        stream.cancel()
