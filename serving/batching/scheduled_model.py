"""Models whose requests are queued, batched and run by instances."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from serving.batching.batcher import Batcher, ResponseOrder
from serving.batching.plan import BatchKeys, read_batch_policy
from serving.batching.rate_limiter import RateLimiter
from serving.batching.sequences.batcher import SequenceBatcher
from serving.batching.sequences.slots import SlotBatcher
from serving.batching.warm_up import WarmUpBatch, gather_runs, warm_up_requests
from serving.caching.response_cache import ResponseCache, open_model_cache
from serving.instance import Instance
from serving.job import InferJob, ReceiveResponse
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.request_check import reshaped_dims
from serving.spec import ModelSource, ModelSpec, build_spec
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError


class SharedServices(Protocol):
    """The part of a `BackendContext` that scheduling needs; None: no rate limit, and a cache of each model's own."""

    @property
    def rate_limiter(self) -> RateLimiter | None: ...

    @property
    def response_cache(self) -> ResponseCache | None: ...


class ScheduledModel(Model):
    """Queues requests for one or more instances, with Triton's dynamic or sequence batcher where configured."""

    _counts_responses = True
    """Whether a decoupled model keeps statistics of each response by its position in the stream."""

    def __init__(
        self,
        source: ModelSource,
        instances: Sequence[Instance],
        labels: Mapping[str, Sequence[str]] | None = None,
        context: SharedServices | None = None,
    ) -> None:
        """Take at least one instance; the model closes its instances. `context` brings rate limiter and cache."""
        super().__init__(source.config, build_spec(source.config, source.version), labels)
        keys, record = BatchKeys(self.spec), self.statistics.record_execution
        limiter = context.rate_limiter if context is not None else None
        self._passive = [each for each in instances if each.placement is not None and each.placement.is_passive]
        serving = [each for each in instances if each not in self._passive]
        self._batchers: Sequence[Batcher | SlotBatcher]
        self._accept: Callable[[InferJob], None]
        self._sequences: SequenceBatcher | None = None
        self._order: ResponseOrder | None = None
        if self.spec.has_sequences:
            # The state of a sequence lies in its instance, so each instance has a queue of its own.
            self._sequences = SequenceBatcher(source, self.spec, serving, record, limiter)
            self._batchers = self._sequences.batchers
            self._accept = self._sequences.start
        else:
            policy = read_batch_policy(source.config)
            batcher = Batcher(policy, keys, serving, record, limiter)
            self._batchers = [batcher]
            self._accept = batcher.start
            self._order = ResponseOrder() if policy.preserves_order else None
        self._output_shapes = OutputShapes(self.spec)
        store = context.response_cache if context is not None else None
        self._cache = open_model_cache(source, self.statistics, store, self._accept)
        self.statistics.count_pending = self._count_pending

    @property
    def is_ready(self) -> bool:
        return super().is_ready and any(batcher.is_ready for batcher in self._batchers)

    def claim_resources(self) -> None:
        for batcher in self._batchers:
            batcher.claim_resources()

    async def warm_up(self, request: InferRequest) -> None:
        """Run the request's rows on every instance that takes requests, as single requests in one batch."""
        requests = warm_up_requests(request, self.spec, self.config)
        await gather_runs([batcher.warm_up(lambda: WarmUpBatch(self, requests)) for batcher in self._batchers])

    def _count_pending(self) -> int:
        in_sequences = self._sequences.num_held if self._sequences is not None else 0
        in_cache = self._cache.num_pending if self._cache is not None else 0
        return in_cache + in_sequences + sum(batcher.num_pending for batcher in self._batchers)

    def submit_held(self, request: InferRequest, receive: ReceiveResponse) -> InferJob:
        if self._order is None:
            return super().submit_held(request, receive)
        ordered = self._order.add(receive)
        try:
            job = super().submit_held(request, ordered.receive)
        except BaseException:
            self._order.discard(ordered)
            raise
        ordered.attach(job)
        return job

    def _start(self, job: InferJob) -> None:
        if self._cache is None or not self._cache.answer(job):
            self._accept(job)

    def responded(self, job: InferJob, response: InferResponse) -> None:
        if self._cache is not None:
            # Kept in the backend's shapes: a response from the cache passes here again.
            self._cache.keep(job, response)
        if self._sequences is not None:
            self._sequences.responded(job, response)
        if self._output_shapes.are_any and response.outputs:
            response.outputs = self._output_shapes.restored(response.outputs)
        if self.spec.is_decoupled and self._counts_responses:
            self.statistics.record_response(job, response)
        elif self.spec.is_decoupled:
            self.statistics.record_first_response(job, response)

    def finished(self, job: InferJob) -> None:
        if self._cache is not None and self._cache.finished(job):
            self._leave()
        else:
            super().finished(job)
        if self._order is not None:
            self._order.advance()
        if self._sequences is not None:
            self._sequences.finished(job)

    def _rejected(self, job: InferJob, error: BaseException) -> None:
        if self._cache is not None:
            self._cache.forget(job)
        super()._rejected(job, error)

    async def close(self) -> None:
        self._is_closing = True
        error = SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.spec.version} is unloaded")
        if self._cache is not None:
            self._cache.close(error)
        if self._sequences is not None:
            self._sequences.close(error)
        await asyncio.gather(
            *(batcher.close(error) for batcher in self._batchers), *(instance.close() for instance in self._passive)
        )


class OutputShapes:
    """Reshapes the backend's outputs to the dims that the configuration declares (`reshape`)."""

    def __init__(self, spec: ModelSpec) -> None:
        self._dims = {
            each.name: (each.reshape, each.dims) for each in spec.outputs.values() if each.reshape is not None
        }
        self._num_leading = 1 if spec.max_batch_size > 0 else 0
        self.are_any = bool(self._dims)

    def restored(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs in the declared shapes. One that the backend shaped otherwise stays as it is."""
        return [self._restored(each) for each in outputs]

    def _restored(self, tensor: Tensor) -> Tensor:
        found = self._dims.get(tensor.name)
        if found is None:
            return tensor
        given, declared = found
        leading, dims = tensor.shape[: self._num_leading], tensor.shape[self._num_leading :]
        if len(dims) != len(given):
            return tensor
        return tensor.reshaped(leading + reshaped_dims(dims, given, declared))
