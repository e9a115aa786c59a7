"""Requests of the server's own, which run on an instance before it serves anybody."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.batching.sequences.inputs import ControlInputs
from serving.instance import Instance
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse, SequenceFlag
from serving.request_check import check_request
from serving.spec import ModelSpec, StateSpec
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Tensor

_ONLY_ONE = SequenceFlag.START | SequenceFlag.END
"""A sequence of one request: whatever the model keeps of it goes with it."""


class WarmUpJob(InferJob):
    """Its model never hears of it: it is in no queue, no statistics, no cache and no sequence."""

    __slots__ = ("_ended",)

    def __init__(self, model: Model, request: InferRequest) -> None:
        super().__init__(model, request, _ignore)
        self._ended = asyncio.Event()
        # An iterative model that wants the request again has run it once, which is what was asked for.
        self.on_reschedule = self._end

    def respond(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.outcome = self.outcome or response.error
        if response.is_final:
            self._end()

    def _end(self) -> None:
        self.is_finished = True
        self.on_cancel = self.on_reschedule = None
        self._ended.set()

    async def wait(self) -> None:
        """Until its final response."""
        await self._ended.wait()


class WarmUpBatch:
    """Requests that an instance runs together, once."""

    def __init__(self, model: Model, requests: Sequence[InferRequest]) -> None:
        self._jobs = [WarmUpJob(model, request) for request in requests]

    async def run_on(self, instance: Instance) -> None:
        """Run on a free instance, until that is free again. Raises the first error among the responses."""
        freed = asyncio.Event()
        now = perf_counter_ns()
        for job in self._jobs:
            job.compute_started_ns = now
            job.executed_batch_size = sum(each.request.batch_size for each in self._jobs)
        try:
            instance.execute([*self._jobs], freed.set)
            for job in self._jobs:
                await job.wait()
            await freed.wait()
        finally:
            for job in self._jobs:
                job.cancel()
        for job in self._jobs:
            if job.outcome is not None:
                raise job.outcome


async def all_of(runs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Side by side. What the first to fail raised is raised when all have ended."""
    results = await asyncio.gather(*runs, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result


def warm_up_requests(request: InferRequest, spec: ModelSpec, config: ModelConfig) -> list[InferRequest]:
    """A checked request for each row, as clients would send them, with what a sequence's requests have besides.

    Raises SluiceError as `check_request`.
    """
    own = spec.control_inputs | {state.input_name for state in spec.states}
    given = {name: request.inputs.pop(name) for name in own & request.inputs.keys()}
    check_request(request, spec)
    inputs = request.inputs | given
    rows = [inputs] if spec.max_batch_size == 0 else [_row(inputs, row) for row in range(request.batch_size)]
    if not spec.has_sequences:
        return [InferRequest(each) for each in rows]
    controls = ControlInputs(config)
    return [_first_of_a_sequence(each, number, controls, spec) for number, each in enumerate(rows, start=1)]


def _row(inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {
        name: Tensor(name, each.datatype, (1, *each.shape[1:]), array=each.array[row : row + 1])
        for name, each in inputs.items()
    }


def _first_of_a_sequence(
    inputs: dict[str, Tensor], correlation_id: int, controls: ControlInputs, spec: ModelSpec
) -> InferRequest:
    added = controls.of(_ONLY_ONE, controls.id_tensor(correlation_id, ()))
    states = {state.input_name: _empty_state(state, spec.max_batch_size > 0) for state in spec.states}
    return InferRequest(added | states | inputs, correlation_id=correlation_id, sequence=_ONLY_ONE)


def _empty_state(state: StateSpec, is_batched: bool) -> Tensor:
    """Zeros, or empty strings; one where a size is left open."""
    shape = [1] * is_batched + [1 if size == -1 else size for size in state.dims]
    value = b"" if state.data_type is BYTES else 0
    return Tensor.of(state.input_name, np.full(shape, value, state.data_type.dtype))


def _ignore(response: InferResponse) -> None:
    """Whoever asked wants no answer."""
