"""Batches between models that batch and models that do not: shapes, and rows as requests of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec
from sluice.serving.tensors.tensor import Tensor

Shape = tuple[int, ...]


def shapes_agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes may be equal; -1 stands for any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def fit_shape(tensor: Tensor, dims: Sequence[int], *, is_batching: bool, batch_size: int) -> Tensor:
    """Reshape a tensor for a reader that expects `dims`, after a batch dimension if `is_batching`.

    Nothing is copied. `batch_size` is that of the request that made the tensor, 0 where its model does not batch.
    Between models that batch and models that do not, a batch dimension of one row is added or removed. A tensor that
    fits as it is passes a whole batch as one tensor.
    """
    shape = tensor.shape
    if is_batching == (batch_size > 0):
        return tensor
    if is_batching:
        return tensor.reshaped((1, *shape)) if shapes_agree(dims, shape) else tensor
    return tensor.reshaped(shape[1:]) if batch_size == 1 and not shapes_agree(dims, shape) else tensor


def find_split_inputs(spec: ModelSpec, inputs: Mapping[str, Tensor], num_rows: int) -> frozenset[str]:
    """Return the inputs to be split into `num_rows` rows: the model takes one at a time. None where it batches."""
    if spec.max_batch_size > 0 or num_rows == 1:
        return frozenset()
    return frozenset(
        name
        for name, tensor in inputs.items()
        if name in spec.inputs
        and not shapes_agree(spec.inputs[name].dims, tensor.shape)
        and tensor.shape[:1] == (num_rows,)
    )


class RowJobs:
    """Submits every row as a job, and gives one response for all. The first error, or `cancel`, ends all rows."""

    def __init__(self, model: Model, receive: ReceiveResponse) -> None:
        """`receive` gets one final response, with a batch dimension."""
        self._model = model
        self._receive = receive
        self._jobs: list[InferJob] = []
        self._responses: list[InferResponse | None] = []
        self._is_over = False

    def submit(self, request: InferRequest, split: frozenset[str], num_rows: int) -> None:
        """Submit the rows. Each gets its part of the `split` inputs and all others. Raises the model's refusal."""
        self._responses = [None] * num_rows
        for row in range(num_rows):
            inputs = {name: _select_row(each, row) if name in split else each for name, each in request.inputs.items()}
            try:
                self._submit_row(replace(request, inputs=inputs, parameters=request.parameters.copy()), row)
            except SluiceError:
                self.cancel()
                raise
            if self._is_over:
                break

    def cancel(self, failed_row: int | None = None) -> None:
        """Cancel all rows. Idempotent."""
        self._is_over = True
        for row, job in enumerate(self._jobs):
            if row != failed_row:  # the failed one ends by itself once its error is passed on
                job.cancel()

    def _submit_row(self, request: InferRequest, row: int) -> None:
        self._jobs.append(self._model.submit_held(request, lambda response: self._receive_row(row, response)))

    def _receive_row(self, row: int, response: InferResponse) -> None:
        if self._is_over:
            return
        if response.error is not None:
            self.cancel(row)
            self._receive(InferResponse(error=response.error))
            return
        self._responses[row] = self._responses[row] or response
        responses = [response for response in self._responses if response is not None]
        if len(responses) == len(self._responses):
            self._is_over = True
            self._receive(self._combine(responses))

    def _combine(self, responses: Sequence[InferResponse]) -> InferResponse:
        first = responses[0]
        try:
            outputs = [
                _stack_rows([response.outputs[index] for response in responses]) for index in range(len(first.outputs))
            ]
        except (IndexError, ValueError):
            message = f"model '{self._model.name}' answered the rows of a batch with tensors of different shapes"
            return InferResponse(error=SluiceError(ErrorCode.INTERNAL, message))
        return InferResponse(outputs, first.parameters)


def _select_row(tensor: Tensor, row: int) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape[1:], array=tensor.array[row])


def _stack_rows(rows: Sequence[Tensor]) -> Tensor:
    array = np.stack([each.array for each in rows])
    return Tensor(rows[0].name, rows[0].datatype, array.shape, array=array)
