"""One request under way in an ensemble."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

from serving.backend import ModelLookup
from serving.backends.ensemble.graph import Graph, Step
from serving.backends.ensemble.limits import StepLimit
from serving.backends.ensemble.parameters import StepParameters
from serving.backends.ensemble.rows import RowJobs, split_inputs
from serving.backends.ensemble.schedule import Schedule, Schedules
from serving.backends.ensemble.sequences import SequenceMark, as_parameters, sequence_after, sequence_of
from serving.backends.ensemble.shapes import fitted
from serving.backends.ensemble.waves import Turns, Value, Wave
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.spec import ModelSpec
from serving.tensors.tensor import Tensor
from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError, invalid


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
        self._job: InferJob | RowJobs | None = None
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

    def _submit(self, model: Model, request: InferRequest) -> InferJob | RowJobs:
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
        sequence: SequenceMark = sequence_after(response, sequence_of(request))
        values = {name: Value(None, batch_size, sequence) for name in self._step.writes}
        for tensor in response.outputs:
            name = self._step.outputs.get(tensor.name)
            if name is not None:
                values[name] = Value(tensor, batch_size, sequence)
        return values


_US_PER_S, _US_PER_MS, _NS_PER_US = 1_000_000, 1_000, 1_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What all requests to an ensemble share. `decoupled`: the steps, by index, of decoupled models."""

    spec: ModelSpec
    graph: Graph
    decoupled: frozenset[int]
    limits: Sequence[StepLimit]
    models: ModelLookup
    schedules: Schedules
    parameters: StepParameters

    @property
    def is_batching(self) -> bool:
        return self.spec.max_batch_size > 0

    @property
    def keeps_time(self) -> bool:
        """Whether a request's time limit is one for all of it, as a language model's is.

        Otherwise it is Triton's, which each step has anew, for as long as it waits to be run.
        """
        return bool(self.decoupled)

    def schedule(self, request: InferRequest) -> Schedule:
        """How `request` runs. Raises SluiceError where the model of a step that may stream is gone."""
        streaming = frozenset(index for index in self.decoupled if self._streams(self.graph.steps[index], request))
        return self.schedules.get(request.requested_outputs, streaming)

    def _streams(self, step: Step, request: InferRequest) -> bool:
        """Whether a step of a decoupled model will: an LLM does only where it is asked to.

        The model sees as much of its request as is known before any step has run.
        """
        inputs = {
            name: request.inputs[tensor].renamed(name)
            for name, tensor in step.inputs.items()
            if tensor in request.inputs
        }
        model = self.models.find(step.model_name, step.version)
        return model.is_decoupled_for(replace(request, inputs=inputs, requested_outputs=tuple(step.outputs)))


class EnsembleRun:
    """Starts each step when the last of its inputs is there, and ends when no step runs.

    Nothing is polled: a step's response begins what it makes possible within its callback. The first error ends the
    request and cancels every step that runs.
    """

    def __init__(self, plan: Plan, job: InferJob) -> None:
        """Raises SluiceError where the model of a step is gone."""
        self.plan = plan
        self.job = job
        self.schedule = plan.schedule(job.request)
        self.is_over = False
        self._running: set[StepRun] = set()
        self._first = Wave(self.schedule.outer)
        self._turns = Turns(self._first)
        self._held: dict[int, Model] = {}
        """The models of the steps, by the step's index: unloaded ones stay until this request has ended."""
        self._num_unsent = 0
        """Responses that wait for their turn."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin. Raises SluiceError where the model of a step is gone or its queue full, before any step runs."""
        try:
            self._hold_models()
        except SluiceError:
            self.release()
            raise
        self.job.on_cancel = self._cancel
        request = self.job.request
        if self.plan.keeps_time and request.timeout_us:
            self._timer = asyncio.get_running_loop().call_later(request.timeout_us / _US_PER_S, self._too_late)
        batch_size = request.batch_size if self.plan.is_batching else 0
        self.feed(self._first, {name: Value(request.inputs.get(name), batch_size) for name in self.plan.spec.inputs})

    def _hold_models(self) -> None:
        for step in self.schedule.steps:
            model = self.plan.models.find(step.model_name, step.version)
            model.hold()
            self._held[step.index] = model
        for model in self._held.values():
            self._refuse_if_full(model)

    def _refuse_if_full(self, model: Model) -> None:
        """Before any step runs, for the sake of the steps before it and of the client, who has no answer begun."""
        try:
            model.refuse_if_full()
        except SluiceError as error:
            message = f"in ensemble '{self.plan.spec.name}', model '{model.name}': {error.message}"
            raise SluiceError(error.code, message, param=error.param, retry_after_s=error.retry_after_s) from None

    def release(self) -> None:
        """The request has ended: its models may go. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        while self._held:
            self._held.popitem()[1].release()

    def model_of(self, step: Step) -> Model:
        """The model of a step, the same one for all of this request."""
        return self._held[step.index]

    def timeout_left_us(self) -> int:
        """The time limit of a step that begins now; 0 is none."""
        limit_us = self.job.request.timeout_us
        if not self.plan.keeps_time or limit_us == 0:
            return limit_us
        left_us = limit_us - (perf_counter_ns() - self.job.started_ns) // _NS_PER_US
        return min(limit_us, max(_US_PER_MS, left_us))

    def _too_late(self) -> None:
        names = ", ".join(sorted(f"'{each.model_name}'" for each in self._running))
        limit_s = self.job.request.timeout_us / _US_PER_S
        message = f"model {names}: the request was not complete within its {limit_s:g} s"
        self.fail(SluiceError(ErrorCode.DEADLINE, message))

    def feed(self, wave: Wave, values: dict[str, Value]) -> None:
        """Put tensors in, start what had waited for them, and send what is complete."""
        wave.values.update(values)
        ready = [StepRun(self, wave, step) for step in self.schedule.ready(values, wave.values)]
        wave.num_running += len(ready)
        self._running.update(ready)
        outputs = wave.level.outputs
        if any(name in values for name in outputs) and all(name in wave.values for name in outputs):
            wave.response = self._response(wave)
            self._num_unsent += 1
        for step_run in ready:
            step_run.enter()
        self.settle()

    def _response(self, wave: Wave) -> InferResponse:
        response = InferResponse()
        for name in wave.level.outputs:
            value, spec = wave.values[name], self.plan.spec.outputs[name]
            if value.tensor is None:
                continue
            dims = spec.dims if spec.reshape is None else spec.reshape
            tensor = fitted(value.tensor, dims, is_batching=self.plan.is_batching, batch_size=value.batch_size)
            response.outputs.append(tensor.renamed(name))
            if value.sequence is not None and not response.parameters:
                response.parameters = as_parameters(value.sequence)
        return response

    def ended(self, step_run: StepRun) -> None:
        """A step gives no more responses."""
        step_run.wave.num_running -= 1
        self._running.discard(step_run)

    def settle(self) -> None:
        """Send what is due, and end where nothing runs any more."""
        if self.is_over:
            return
        for response in self._turns.due():
            self._num_unsent -= 1
            self.is_over = response.is_final = not self._running and not self._num_unsent
            self.job.respond(response)
            if self.is_over:
                return
        if not self._running:
            self.is_over = True
            self.job.respond(InferResponse())

    def fail(self, error: SluiceError) -> None:
        """End the request; what still runs is wanted no more."""
        if self.is_over:
            return
        self.stop()
        message = f"in ensemble '{self.plan.spec.name}', {error.message}"
        self.job.fail(SluiceError(error.code, message, param=error.param, retry_after_s=error.retry_after_s))

    def stop(self) -> None:
        """Cancel every step that runs."""
        self.is_over = True
        for step_run in list(self._running):
            step_run.cancel()

    def _cancel(self) -> None:
        self.stop()
        self.job.respond(InferResponse())
