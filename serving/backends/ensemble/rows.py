"""The rows of a batch as requests of their own, to a model that does not batch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from serving.backends.ensemble.shapes import agree
from serving.job import InferJob, ReceiveResponse
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.spec import ModelSpec
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError


def split_inputs(spec: ModelSpec, inputs: Mapping[str, Tensor], num_rows: int) -> frozenset[str]:
    """The inputs that hold a row for each of several, where the model takes one at a time. None of a batching model."""
    if spec.max_batch_size > 0 or num_rows == 1:
        return frozenset()
    return frozenset(
        name
        for name, tensor in inputs.items()
        if name in spec.inputs and not agree(spec.inputs[name].dims, tensor.shape) and tensor.shape[:1] == (num_rows,)
    )


class RowJobs:
    """Asks the model for every row at once, and gives one response when the last row has answered.

    The first error, or `cancel`, ends all rows.
    """

    def __init__(self, model: Model, receive: ReceiveResponse) -> None:
        """`receive` gets one final response, with a batch dimension."""
        self._model = model
        self._receive = receive
        self._jobs: list[InferJob] = []
        self._answers: list[InferResponse | None] = []
        self._is_over = False

    def submit(self, request: InferRequest, split: frozenset[str], num_rows: int) -> None:
        """Each row gets its own of the inputs `split`, and the others whole. Raises what the model refuses."""
        self._answers = [None] * num_rows
        for row in range(num_rows):
            inputs = {name: _row(each, row) if name in split else each for name, each in request.inputs.items()}
            try:
                self._submit_row(replace(request, inputs=inputs, parameters=request.parameters.copy()), row)
            except SluiceError:
                self.cancel()
                raise
            if self._is_over:
                break

    def cancel(self) -> None:
        """Want no more of it. Idempotent."""
        self._end()

    def _end(self, failed_row: int | None = None) -> None:
        self._is_over = True
        for row, job in enumerate(self._jobs):
            if row != failed_row:  # which ends by itself, as soon as its error is passed on
                job.cancel()

    def _submit_row(self, request: InferRequest, row: int) -> None:
        self._jobs.append(self._model.submit_held(request, lambda response: self._answered(row, response)))

    def _answered(self, row: int, response: InferResponse) -> None:
        if self._is_over:
            return
        if response.error is not None:
            self._end(row)
            self._receive(InferResponse(error=response.error))
            return
        self._answers[row] = self._answers[row] or response
        answers = [answer for answer in self._answers if answer is not None]
        if len(answers) == len(self._answers):
            self._is_over = True
            self._receive(self._together(answers))

    def _together(self, answers: Sequence[InferResponse]) -> InferResponse:
        first = answers[0]
        try:
            outputs = [_stacked([answer.outputs[index] for answer in answers]) for index in range(len(first.outputs))]
        except (IndexError, ValueError):
            message = f"model '{self._model.name}' answered the rows of a batch with tensors of different shapes"
            return InferResponse(error=SluiceError(ErrorCode.INTERNAL, message))
        return InferResponse(outputs, first.parameters)


def _row(tensor: Tensor, row: int) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape[1:], array=tensor.array[row])


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    array = np.stack([each.array for each in rows])
    return Tensor(rows[0].name, rows[0].datatype, array.shape, array=array)
