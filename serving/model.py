"""A model version, which every protocol calls whatever runs behind it, and its callbacks as awaitables."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.record.spans import current_span
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.request_check import check_request
from sluice.serving.spec import ModelSource, ModelSpec
from sluice.serving.statistics import ModelStatistics

T = TypeVar("T")
ItemT = TypeVar("ItemT", contravariant=True)

MAX_UNREAD = 16_384
"""Most responses that a stream's reader may be behind. One further behind is cancelled: it would fill the memory."""
_EMPTY_REQUEST = InferRequest(inputs={})


class Model(ABC):
    """One loaded version of a model. Everything happens on the event loop's thread."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, labels: Mapping[str, Sequence[str]] | None = None) -> None:
        """`labels`: the lines of each output's label file, by output name."""
        self.config = config
        self.spec = spec
        self.labels = dict(labels or {})
        self.statistics = ModelStatistics()
        self.created = int(time.time())
        """Time of the load, in seconds since 1970."""
        self.calls_models = False
        """Whether it has asked other models by itself: only the code of a Python model knows which."""
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
        """Whether a request would be served now: false while its process is being restarted, or is lost."""
        return not self._is_closing

    @property
    def is_lost(self) -> bool:
        """Whether its process is lost for good: it serves again only when it is loaded again."""
        return False

    def is_decoupled_for(self, request: InferRequest) -> bool:
        """Whether `request` may get other than one response. An LLM gives one unless the request asks for a stream."""
        return self.spec.is_decoupled

    @property
    def step_models(self) -> "Sequence[Model]":
        """The models of its steps, for an ensemble, as far as they are loaded."""
        return ()

    @property
    def streams_unasked(self) -> bool:
        """Whether even a request that does not ask for a stream may get other than one response."""
        return self.is_decoupled_for(_EMPTY_REQUEST)

    def submit(self, request: InferRequest, receive: ReceiveResponse) -> InferJob:
        """Start `request`; `receive` gets its responses, possibly before this returns.

        Raises SluiceError for a request that is rejected before it starts: INVALID in Triton's words where it does not
        fit the model, OVERLOADED for a full queue, UNAVAILABLE for a model that is being unloaded.
        """
        self._refuse_if_closing()
        return self.submit_held(request, receive)

    def submit_held(self, request: InferRequest, receive: ReceiveResponse) -> InferJob:
        """Start `request` as `submit` does, for a caller that holds the model; also while it is being unloaded."""
        check_request(request, self.spec)
        job = InferJob(self, request, receive)
        self._enter()
        above = current_span.get()
        if above is not None:
            current_span.set(job.begin_span(above, self.spec))
        try:
            self._start(job)
        except BaseException as error:
            self._rejected(job, error)
            raise
        finally:
            if above is not None:
                current_span.set(above)
        return job

    def refuse_if_full(self) -> None:  # noqa: B027 - what has no queue is never full
        """Raise OVERLOADED where a request would be rejected now. An ensemble asks before it runs earlier steps."""

    def hold(self) -> None:
        """Keep the model open until `release`, for an ensemble's steps. Raises UNAVAILABLE where it is unloading."""
        self._refuse_if_closing()
        self._enter()

    def release(self) -> None:
        """End one `hold`."""
        self._leave()

    @abstractmethod
    def _start(self, job: InferJob) -> None:
        """Queue or run a checked job. Raises SluiceError where it is rejected; never blocks."""

    def responded(self, job: InferJob, response: InferResponse) -> None:
        """Count a response. Called by the job with each one that it passes on."""
        if self.spec.is_decoupled:
            self.statistics.record_response(job, response)

    def finished(self, job: InferJob) -> None:
        """Count the request. Called by the job, once, when it has ended."""
        self.statistics.record_request(job)
        job.end_span()
        self._leave()

    def _rejected(self, job: InferJob, error: BaseException) -> None:
        job.is_finished = True
        if isinstance(error, SluiceError):
            job.outcome = error
            if error.code is not ErrorCode.INVALID:  # as in Triton, an invalid request is not counted at all
                self.statistics.record_rejection(job)
        job.end_span()
        self._leave()

    def _refuse_if_closing(self) -> None:
        if self._is_closing:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.version} is being unloaded")

    def retire(self) -> None:
        """Accept no new requests from now on."""
        self._is_closing = True

    @property
    def is_retired(self) -> bool:
        """Whether it accepts no new requests: another version may have taken its place."""
        return self._is_closing

    def _enter(self) -> None:
        self._num_in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._idle.set()

    def claim_resources(self) -> None:  # noqa: B027 - what has no instances needs nothing
        """Register its needs with the rate limiter before it is ready. Raises INVALID for more than there is."""

    async def warm_up(self, request: InferRequest) -> None:
        """Run `request` once on all that runs such requests, uncounted, before it is ready. Raises its error."""
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

    async def update_instances(self, source: ModelSource) -> bool:
        """Run on the instances of `source` from now on, which is otherwise the model's own.

        Returns False where nothing has changed and the model must be loaded again. Raises as a load does.
        """
        return False

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def is_idle(self) -> bool:
        return self._num_in_flight == 0

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def unload(self, timeout_s: float | None = None) -> None:
        """Accept no new requests, wait up to `timeout_s` for those in flight, and free everything."""
        self.retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Free everything now; jobs in flight end in an error. Idempotent."""


async def infer_one(model: Model, request: InferRequest) -> InferResponse:
    """Return the response of a model that is not decoupled. Raises its error. Cancellation reaches the request."""
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


class ItemConsumer(Protocol[ItemT]):
    """Takes the items of one outbox, in order, as the consumers of an engine's events take these."""

    def take(self, item: ItemT) -> bool:
        """Take an item. Returns False where `ready` must be awaited before the next one."""

    async def ready(self) -> None:
        """Wait until the consumer can take the next item."""


class Outbox(Generic[T]):
    """Items for one consumer on the event loop, in order. `pass_to` pushes them, those of a turn of the loop at its
    end. Those that come while the consumer is not ready are kept."""

    def __init__(self) -> None:
        self._unread: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._consumer: ItemConsumer[T] | None = None
        self._is_ready = True
        """Whether the consumer can take the next item."""
        self._is_due = False
        """Whether the consumer is about to get what has come."""
        self._has_ended = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._unread)

    def put(self, item: T) -> None:
        self._unread.append(item)
        self._announce()

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing follows. `error` is raised to the consumer's task when it has what came before. Idempotent:
        the first end counts."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._announce()

    def take(self) -> list[T]:
        """Return what has come and was not taken yet, without waiting."""
        taken = list(self._unread)
        self._unread.clear()
        return taken

    async def pass_to(self, consumer: ItemConsumer[T]) -> None:
        """Push all items to `consumer`, up to the end. Raises the end's error, and what the consumer raises."""
        self._consumer = consumer
        try:
            while True:
                self._hand_on()
                if not self._is_ready:
                    await consumer.ready()
                    self._is_ready = True
                elif not self._has_ended:
                    await self._wait_for_news()
                elif not self._unread:
                    break
        finally:
            self._consumer = None
        if self._error is not None:
            error, self._error = self._error, None  # its frames hold this object
            raise error

    def _announce(self) -> None:
        if self._consumer is not None and self._is_ready and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        self._is_due = False
        unread, consumer = self._unread, self._consumer
        try:
            while unread and self._is_ready and consumer is not None:
                self._is_ready = consumer.take(unread.popleft())
        except Exception as error:
            unread.clear()
            self._has_ended, self._error = True, error
        if self._has_ended or not self._is_ready:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_for_news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class ResponseStream(Outbox[InferResponse]):
    """The responses of one request, as they arrive. The last one is final and may be empty."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        """Submit the request. Raises as `Model.submit`."""
        super().__init__()
        self._job: InferJob | None = None
        self._job = model.submit(request, self._receive)

    async def pass_to(self, consumer: ItemConsumer[InferResponse]) -> None:
        """Push all responses to `consumer`. Raises OVERLOADED where it falls too far behind, and what it raises. The
        request is cancelled where that, or the task, ends early."""
        try:
            await super().pass_to(consumer)
        finally:
            self.cancel()

    def _receive(self, response: InferResponse) -> None:
        self.put(response)
        if response.is_final:
            self.end()
        elif len(self) > MAX_UNREAD and self._job is not None:
            self._job.cancel()
            self.end(SluiceError(ErrorCode.OVERLOADED, f"the client fell {MAX_UNREAD} responses behind"))

    def cancel(self) -> None:
        """Cancel the request. Idempotent, and harmless after its end."""
        if self._job is not None:
            self._job.cancel()
