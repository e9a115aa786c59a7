"""A model whose requests are queued, gathered into batches and run by instances."""

import asyncio
from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import BackendContext, Instance, ModelSource
from pipelines.batching.batcher import Batcher
from pipelines.batching.cached import CachedAnswers
from pipelines.batching.keys import BatchKeys
from pipelines.batching.ordering import ResponseOrder
from pipelines.batching.output_shapes import OutputShapes
from pipelines.batching.policy import batch_policy_of, sequence_policy_of
from pipelines.batching.sequence import SequenceBatcher
from pipelines.inference.job import Job, Receive
from pipelines.inference.model import Model
from pipelines.inference.spec import spec_of
from pipelines.inference.types import InferRequest, InferResponse


class ScheduledModel(Model):
    """A queue before one or more instances, with Triton's dynamic or sequence batcher where it is configured."""

    def __init__(
        self,
        source: ModelSource,
        instances: Sequence[Instance],
        labels: Mapping[str, Sequence[str]] | None = None,
        context: BackendContext | None = None,
    ) -> None:
        """At least one of `instances`, which are closed with the model. `context`: limits and cache, where shared."""
        super().__init__(source.config, spec_of(source.config, source.version), labels)
        keys, record = BatchKeys(self.spec), self.statistics.record_execution
        self._sequences: SequenceBatcher | None = None
        self._order: ResponseOrder | None = None
        if self.spec.has_sequences:
            # A sequence's state lies in its instance, so each instance has a queue of its own.
            lane = sequence_policy_of(source.config)
            self._batchers = [Batcher(lane, keys, [instance], record) for instance in instances]
            self._sequences = SequenceBatcher(source.config, self._batchers)
        else:
            policy = batch_policy_of(source.config)
            self._batchers = [Batcher(policy, keys, instances, record)]
            self._order = ResponseOrder() if policy.preserves_order else None
        self._output_shapes = OutputShapes(self.spec)
        # Triton's Python backend keeps no statistics of single responses, and its clients expect none.
        self._reports_responses = self.spec.is_decoupled and self.spec.backend != "python"
        self._cache = CachedAnswers(self.statistics) if _is_cached(source.config) else None
        self.statistics.count_pending = self._count_pending

    @property
    def is_ready(self) -> bool:
        return super().is_ready and any(batcher.is_ready for batcher in self._batchers)

    def _count_pending(self) -> int:
        held = self._sequences.num_held if self._sequences is not None else 0
        return held + sum(batcher.num_pending for batcher in self._batchers)

    def submit_held(self, request: InferRequest, receive: Receive) -> Job:
        if self._order is None:
            return super().submit_held(request, receive)
        ordered = self._order.open(receive)
        try:
            ordered.job = super().submit_held(request, ordered.receive)
        except BaseException:
            self._order.discard(ordered)
            raise
        return ordered.job

    def _start(self, job: Job) -> None:
        if self._cache is not None and self._cache.answer(job):
            return
        if self._sequences is not None:
            self._sequences.start(job)
        else:
            self._batchers[0].start(job)

    def responded(self, job: Job, response: InferResponse) -> None:
        if self._output_shapes.are_any and response.outputs:
            response.outputs = self._output_shapes.restored(response.outputs)
        if self._reports_responses:
            self.statistics.record_response(job, response)
        if self._cache is not None:
            self._cache.keep(job, response)

    def finished(self, job: Job) -> None:
        if self._cache is not None and self._cache.finished(job):
            self._leave()
        else:
            super().finished(job)
        if self._order is not None:
            self._order.advance()
        if self._sequences is not None:
            self._sequences.finished(job)

    def _refused(self, job: Job, error: BaseException) -> None:
        if self._cache is not None:
            self._cache.forget(job)
        super()._refused(job, error)

    async def close(self) -> None:
        self._is_closing = True
        error = SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.spec.version} is unloaded")
        if self._sequences is not None:
            self._sequences.close(error)
        await asyncio.gather(*(batcher.close(error) for batcher in self._batchers))


def _is_cached(config: ModelConfig) -> bool:
    """Whether equal requests get equal responses: a stream is not kept, and a sequence has a state."""
    is_plain = not config.model_transaction_policy.decoupled and not config.HasField("sequence_batching")
    return config.response_cache.enable and is_plain
