"""One step of one request under way in an ensemble."""

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import CANNOT_SERVE, ErrorCode, SluiceError, invalid
from pipelines.backends.ensemble.graph import Step
from pipelines.backends.ensemble.rows import RowJobs, split_inputs
from pipelines.backends.ensemble.sequences import Sequence, sequence_after, sequence_of
from pipelines.backends.ensemble.shapes import fitted
from pipelines.backends.ensemble.waves import Value, Wave
from pipelines.inference.job import Job
from pipelines.inference.model import Model
from pipelines.inference.types import InferRequest, InferResponse
from pipelines.tensors.tensor import Tensor

if TYPE_CHECKING:
    from pipelines.backends.ensemble.run import EnsembleRun


class StepRun:
    """Asks the step's model, and hands its responses on."""

    def __init__(self, run: "EnsembleRun", wave: Wave, step: Step) -> None:
        self.wave = wave
        self._run = run
        self._step = step
        self._limit = run.plan.limits[step.index]
        self._level = run.schedule.inner.get(step.index)
        """What it streams into; None where it gives one response."""
        self._model: Model | None = None
        self._job: Job | RowJobs | None = None
        self._num_rows = 0
        """The rows that a model which does not batch answers one by one; 0 where it has them as one."""
        self._has_answered = False
        self._is_ended = False

    @property
    def model_name(self) -> str:
        return self._step.model_name

    def enter(self) -> None:
        """Begin as soon as the step's limit lets it."""
        self._limit.enter(self._begin)

    def _begin(self) -> bool:
        if self._run.is_over:
            return False
        try:
            self._model = model = self._run.model_of(self._step)
            request = self._request_to(model)
            if self._level is None and model.is_decoupled_for(request):
                problem = "gives any number of responses, which the request to the ensemble did not ask for"
                raise SluiceError(ErrorCode.UNIMPLEMENTED, f"model '{model.name}' {problem}")
            self._job = self._submit(model, request)
        except SluiceError as error:
            self._run.fail(self._named(error))
            self._end()
            self._limit.leave()
            return True
        if self._run.is_over:
            self.cancel()
        return True

    def _submit(self, model: Model, request: InferRequest) -> Job | RowJobs:
        def receive(response: InferResponse) -> None:
            self._receive(request, response)

        num_rows = self._run.job.request.batch_size
        split = split_inputs(model.spec, request.inputs, num_rows)
        if not split:
            return model.submit_held(request, receive)
        self._num_rows = num_rows
        if self._level is not None:
            raise invalid("stream", f"only a request of one row can stream, this one has {num_rows}")
        rows = RowJobs(model, receive)
        rows.submit(request, split, num_rows)
        return rows

    def cancel(self) -> None:
        """Want no more of it. Before there is a job nothing is to be done: `_begin` sees by itself that all is over."""
        if self._job is not None and not self._is_ended:
            self._end()
            self._job.cancel()
            self._limit.leave()

    def _end(self) -> None:
        self._is_ended = True
        self._run.ended(self)

    def _request_to(self, model: Model) -> InferRequest:
        outer = self._run.job.request
        values = [self.wave.values[name] for name in self._step.reads]
        own = next((value.sequence for value in values if value.sequence is not None), None)
        correlation_id, sequence = own if own is not None else sequence_of(outer)
        return replace(
            outer,
            inputs=self._inputs_of(model),
            requested_outputs=tuple(self._step.outputs),
            parameters=self._run.plan.parameters.of_step(model.name, outer.parameters),
            correlation_id=correlation_id,
            sequence=sequence,
            batch_size=1,
            timeout_us=self._run.timeout_left_us(),
        )

    def _inputs_of(self, model: Model) -> dict[str, Tensor]:
        inputs = {}
        for name, source in self._step.inputs.items():
            value, spec = self.wave.values[source], model.spec.inputs.get(name)
            tensor = value.tensor
            if tensor is None:
                continue
            if spec is not None:
                is_batching = model.spec.max_batch_size > 0
                tensor = fitted(tensor, spec.dims, is_batching=is_batching, batch_size=value.batch_size)
            inputs[name] = tensor.renamed(name)
        return inputs

    def _receive(self, request: InferRequest, response: InferResponse) -> None:
        if response.is_final and not self._is_ended:
            self._end()
        if not self._run.is_over:
            self._hand_on(request, response)
        if response.is_final:
            # Only now: it may begin a step of this very request, which must find this response's tensors in place.
            self._limit.leave()

    def _hand_on(self, request: InferRequest, response: InferResponse) -> None:
        if response.error is not None:
            self._run.fail(self._named(response.error))
        elif response.outputs or not (self._level is not None or self._has_answered):
            self._has_answered = True
            try:
                values = self._values_of(request, response)
            except SluiceError as error:
                self._run.fail(error)
                return
            self._run.feed(self.wave if self._level is None else self.wave.add_child(self._level), values)
        else:
            self._run.settle()

    def _named(self, error: SluiceError) -> SluiceError:
        """The error with the step's model, where that cannot serve now. What a model says itself is told as it is."""
        name = self._step.model_name
        if error.code not in CANNOT_SERVE or f"'{name}'" in error.message:
            return error
        message = f"model '{name}': {error.message}"
        return SluiceError(error.code, message, param=error.param, retry_after_s=error.retry_after_s)

    def _values_of(self, request: InferRequest, response: InferResponse) -> dict[str, Value]:
        """An output that the response lacks is there as nothing: it may be an optional input of the next step."""
        assert self._model is not None
        batch_size = request.batch_size if self._model.spec.max_batch_size > 0 else self._num_rows
        sequence: Sequence = sequence_after(response, sequence_of(request))
        values = {name: Value(None, batch_size, sequence) for name in self._step.writes}
        for tensor in response.outputs:
            name = self._step.outputs.get(tensor.name)
            if name is not None:
                values[name] = Value(tensor, batch_size, sequence)
        return values
