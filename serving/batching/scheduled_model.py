"""Models whose requests are queued, batched and run by instances."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.batcher import Batcher, ResponseOrder
from sluice.serving.batching.plan import BatchKeys, read_batch_policy
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.sequences.batcher import SequenceBatcher
from sluice.serving.batching.sequences.slots import SlotBatcher
from sluice.serving.batching.warm_up import WarmUpBatch, gather_runs, warm_up, warm_up_requests
from sluice.serving.caching.response_cache import ResponseCache, open_model_cache
from sluice.serving.instance import Instance, Placement, match_placements, place_instances
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.request_check import reshaped_dims
from sluice.serving.spec import ModelSource, ModelSpec, build_spec
from sluice.serving.tensors.tensor import Tensor

_RETIRED = SluiceError(ErrorCode.UNAVAILABLE, "the instance is closed: its instance_group has changed")


class SharedServices(Protocol):
    """The part of a `BackendContext` that scheduling needs; None: no rate limit, and a cache of each model's own."""

    @property
    def rate_limiter(self) -> RateLimiter | None: ...

    @property
    def response_cache(self) -> ResponseCache | None: ...


StartInstances = Callable[[ModelSource, Sequence[Placement]], Awaitable[Sequence[Instance]]]
"""Starts instances of a model. Raises SluiceError as a load does, and leaves nothing running then."""


class InstanceStarter(NamedTuple):
    """Starts further instances of a model while it serves."""

    num_gpus: int
    """Number of GPUs that they can be placed on."""
    start: StartInstances


class RetiredInstance(NamedTuple):
    """An instance that gets no new work, and is closed once it is idle."""

    is_idle: Callable[[], bool]
    close: Callable[[], Coroutine[Any, Any, None]]


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
        starter: InstanceStarter | None = None,
    ) -> None:
        """Take at least one instance; the model closes its instances. `context` brings rate limiter and cache.

        Without a `starter` the instances cannot change.
        """
        super().__init__(source.config, build_spec(source.config, source.version), labels)
        keys, record = BatchKeys(self.spec), self._executed
        limiter = context.rate_limiter if context is not None else None
        self._is_limited = limiter is not None
        self._starter = starter
        self._instances = list(instances)
        self._retired: list[RetiredInstance] = []
        self._closing: set[asyncio.Task[None]] = set()
        serving = [each for each in instances if not _is_passive(each)]
        self._batchers: Sequence[Batcher | SlotBatcher]
        self._accept: Callable[[InferJob], None]
        self._sequences: SequenceBatcher | None = None
        self._order: ResponseOrder | None = None
        if self.spec.has_sequences:
            # The state of a sequence lies in its instance, so each instance has a queue of its own.
            self._sequences = SequenceBatcher(source, self.spec, serving, record, limiter, self._close_retired_soon)
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

    async def update_instances(self, source: ModelSource) -> bool:
        """Run on the instances of `source`. Those that stay are not touched, others end with what they run; idle ones
        have ended when this returns, as with Triton.

        Returns False where the model must be loaded again, as with resources of the rate limiter.
        """
        if self._starter is None:
            return False
        present = {id(each.placement): each.placement for each in self._instances if each.placement is not None}
        wanted = place_instances(source.config, self._starter.num_gpus)
        if self._is_limited and any(each.resources for each in (*present.values(), *wanted)):
            return False
        pairs, new = match_placements(present.values(), wanted)
        added = list(await self._starter.start(source, new)) if new else []
        try:
            await warm_up(self, source, run=partial(self._warm_up_instances, added))
            self._refuse_if_closing()
        except BaseException:
            await asyncio.gather(*(each.close() for each in added))
            raise
        self._change_instances({id(before): after for before, after in pairs}, added)
        self.config.ClearField("instance_group")
        self.config.instance_group.extend(source.config.instance_group)
        if self._closing:
            await asyncio.wait(self._closing)
        return True

    async def _warm_up_instances(self, instances: Sequence[Instance], request: InferRequest) -> None:
        requests = warm_up_requests(request, self.spec, self.config)
        distinct = {id(each.placement): each for each in reversed(instances)}.values()
        await gather_runs([WarmUpBatch(self, requests).run_on(each) for each in distinct])

    def _change_instances(self, stays: Mapping[int, Placement], added: Sequence[Instance]) -> None:
        """Run on the instances whose placement `stays`, by its id with its new value, and on `added`."""
        kept = [each for each in self._instances if id(each.placement) in stays]
        removed = [each for each in self._instances if each not in kept]
        for each in kept:
            each.placement = stays[id(each.placement)]
        self._instances = [*kept, *added]
        serving = [each for each in added if not _is_passive(each)]
        if self._sequences is not None:
            batchers = self._sequences.change_instances(serving, removed)
            slots = {id(each.instance): each for each in batchers}
            self._retired += [_retired_with_sequences(each, slots.get(id(each))) for each in removed]
        else:
            for batcher in self._batchers:
                assert isinstance(batcher, Batcher)
                batcher.change_instances(serving, removed)
            self._retired += [RetiredInstance(partial(_is_idle, each), each.close) for each in removed]
        self._close_retired()

    def _executed(self, jobs: list[InferJob]) -> None:
        self.statistics.record_execution(jobs)
        self._close_retired_soon()

    def _close_retired_soon(self) -> None:
        if self._retired:
            # Not at once: the instance is still ending the batch.
            asyncio.get_running_loop().call_soon(self._close_retired)

    def _close_retired(self) -> None:
        for each in [each for each in self._retired if each.is_idle()]:
            self._retired.remove(each)
            task = asyncio.create_task(each.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

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
        self._close_retired_soon()

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
            *(batcher.close(error) for batcher in self._batchers),
            *(each.close() for each in self._instances if _is_passive(each)),
            *(each.close() for each in self._retired),
            *self._closing,
        )


def _is_passive(instance: Instance) -> bool:
    return instance.placement is not None and instance.placement.is_passive


def _is_idle(instance: Instance, batcher: SlotBatcher | None = None) -> bool:
    return instance.is_idle and (batcher is None or not batcher.slots.num_taken)


def _retired_with_sequences(instance: Instance, batcher: SlotBatcher | None) -> RetiredInstance:
    """Return an instance that is closed after its last sequence; a passive one has no batcher."""
    close = instance.close if batcher is None else partial(batcher.close, _RETIRED)
    return RetiredInstance(partial(_is_idle, instance, batcher), close)


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
