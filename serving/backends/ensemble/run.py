"""Runs a request to an ensemble: its steps, the data that flows between them, and the order of its responses."""

import asyncio
import logging
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass, replace
from time import perf_counter_ns

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError, invalid, invalid_argument
from sluice.serving.backends.ensemble.graph import EnsembleStep, RowJobs, find_split_inputs, fit_shape
from sluice.serving.backends.ensemble.schedule import EnsemblePlan, StreamLevel
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse, Parameters, SequenceFlag
from sluice.serving.tensors.tensor import Tensor

SequencePosition = tuple[int | str, SequenceFlag]
"""Correlation id, and the request's position in its sequence."""
_NAMES = {"sequence_id", "sequence_start", "sequence_end"}
log = logging.getLogger(__name__)

_US_PER_S, _US_PER_MS, _NS_PER_US = 1_000_000, 1_000, 1_000


@dataclass(frozen=True, slots=True)
class TensorValue:
    """Value of an ensemble tensor.

    `tensor` is None for an optional input that is absent, or an output that a step left out. `batch_size` is that of
    the request that made it, 0 where its model does not batch. Inputs of the ensemble have no `sequence` of their own.
    """

    tensor: Tensor | None
    batch_size: int
    sequence: SequencePosition | None = None


class TensorScope:
    """Tensors that derive from one response of a decoupled step; the outermost scope has the request's own.

    A streaming step opens a scope for each of its responses, nested in the scope that it runs in. A scope gives at most
    one response, before those of its nested scopes.
    """

    __slots__ = ("children", "level", "next_child", "num_children", "num_running", "parent", "response", "values")

    def __init__(self, level: StreamLevel, parent: "TensorScope | None" = None) -> None:
        self.level = level
        self.parent = parent
        self.values: dict[str, TensorValue] = {}
        if parent is not None:
            self.values = {name: parent.values[name] for name in level.inherited}
        self.num_running = 0
        """Steps that run in the scope."""
        self.response: InferResponse | None = None
        """Response that is complete and waits for its turn."""
        self.children: dict[int, TensorScope] = {}
        """Nested scopes whose turn is not over, by number."""
        self.num_children = 0
        self.next_child = 0

    def add_child(self, level: StreamLevel) -> "TensorScope":
        child = self.children[self.num_children] = TensorScope(level, self)
        self.num_children += 1
        return child


class ResponseSequencer:
    """Gives out the responses of scopes in the order of the decoupled steps' responses that opened the scopes.

    Steps may overtake each other where a model has several instances; a stream of tokens must not. The turn of a scope
    ends when nothing runs in it any more.
    """

    def __init__(self, first: TensorScope) -> None:
        self._current: TensorScope | None = first

    def due_responses(self) -> Iterator[InferResponse]:
        """Yield the responses that are due now."""
        while self._current is not None:
            scope = self._current
            if scope.response is not None:
                response, scope.response = scope.response, None
                yield response
            elif scope.children:
                self._current = scope.children[scope.next_child]
            elif scope.num_running:
                return
            else:
                self._current = scope.parent
                _end_turn(scope)


def _end_turn(scope: TensorScope) -> None:
    if scope.parent is not None:
        del scope.parent.children[scope.parent.next_child]
        scope.parent.next_child += 1


def request_sequence(request: InferRequest) -> SequencePosition:
    return request.correlation_id, request.sequence


def response_sequence(response: InferResponse, own: SequencePosition) -> SequencePosition:
    """Return the position that a step's response gives, else `own`, the request's. Raises INVALID for wrong types."""
    given = response.parameters
    if not given.keys() & _NAMES:
        return own
    correlation_id = given.get("sequence_id", own[0])
    if isinstance(correlation_id, bool | float):
        message = "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        raise invalid_argument(message)
    flags = SequenceFlag.NONE
    if _is_set(given, "sequence_start"):
        flags |= SequenceFlag.START
    if _is_set(given, "sequence_end"):
        flags |= SequenceFlag.END
    return correlation_id, flags


def sequence_parameters(sequence: SequencePosition) -> Parameters:
    """Return a sequence position as parameters of the ensemble's response."""
    correlation_id, flags = sequence
    return {
        "sequence_id": correlation_id,
        "sequence_start": SequenceFlag.START in flags,
        "sequence_end": SequenceFlag.END in flags,
    }


def _is_set(parameters: Parameters, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise invalid_argument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
    return value


class StepRun:
    """One run of a step: submits a request to the step's model and forwards the responses."""

    def __init__(self, run: "EnsembleRun", scope: TensorScope, step: EnsembleStep) -> None:
        self.scope = scope
        self._run = run
        self._step = step
        self.model_name = step.model_name
        self._limit = run.plan.limits[step.index]
        self._level = run.schedule.inner.get(step.index)
        """Stream level that the step's responses open; None where it gives one response."""
        self._model: Model | None = None
        self._job: InferJob | RowJobs | None = None
        self._num_rows = 0
        """Rows that are submitted one by one to a model that does not batch; 0 where they are submitted together."""
        self._has_answered = False
        self._is_ended = False

    def start(self) -> None:
        """Begin as soon as the step's limit admits it."""
        self._limit.acquire(self._begin)

    def _begin(self) -> bool:
        if self._run.is_over:
            return False
        try:
            self._model = model = self._run.step_models[self._step.index]
            request = self._build_request(model)
            if self._level is None and model.is_decoupled_for(request):
                problem = "gives any number of responses, which the request to the ensemble did not ask for"
                raise SluiceError(ErrorCode.UNIMPLEMENTED, f"model '{model.name}' {problem}")
            self._job = self._submit(model, request)
        except SluiceError as error:
            self._run.fail(self._with_model_name(error))
            self._end()
            self._limit.release()
            return True
        if self._run.is_over:
            self.cancel()
        return True

    def _submit(self, model: Model, request: InferRequest) -> InferJob | RowJobs:
        def receive(response: InferResponse) -> None:
            self._receive(request, response)

        num_rows = self._run.job.request.batch_size
        split = find_split_inputs(model.spec, request.inputs, num_rows)
        if not split:
            return self._run.context.copy().run(model.submit_held, request, receive)
        self._num_rows = num_rows
        if self._level is not None:
            raise invalid("stream", f"only a request of one row can stream, this one has {num_rows}")
        rows = RowJobs(model, receive)
        self._run.context.copy().run(rows.submit, request, split, num_rows)
        return rows

    def cancel(self) -> None:
        """Cancel the step's job. Without one there is nothing to do: `_begin` checks whether the request is over."""
        if self._job is not None and not self._is_ended:
            self._end()
            self._job.cancel()
            self._limit.release()

    def _end(self) -> None:
        self._is_ended = True
        self._run.step_ended(self)

    def _build_request(self, model: Model) -> InferRequest:
        outer = self._run.job.request
        values = [self.scope.values[name] for name in self._step.reads]
        own = next((value.sequence for value in values if value.sequence is not None), None)
        correlation_id, sequence = own if own is not None else request_sequence(outer)
        return replace(
            outer,
            inputs=self._build_inputs(model),
            requested_outputs=tuple(self._step.outputs),
            parameters=self._run.plan.parameters.select(model.name, outer.parameters),
            correlation_id=correlation_id,
            sequence=sequence,
            batch_size=1,
            timeout_us=self._run.remaining_timeout_us(),
        )

    def _build_inputs(self, model: Model) -> dict[str, Tensor]:
        inputs = {}
        for name, source in self._step.inputs.items():
            value, spec = self.scope.values[source], model.spec.inputs.get(name)
            tensor = value.tensor
            if tensor is None:
                continue
            if spec is not None:
                is_batching = model.spec.max_batch_size > 0
                tensor = fit_shape(tensor, spec.dims, is_batching=is_batching, batch_size=value.batch_size)
            inputs[name] = tensor.renamed(name)
        return inputs

    def _receive(self, request: InferRequest, response: InferResponse) -> None:
        if response.is_final and not self._is_ended:
            self._end()
        if not self._run.is_over:
            self._forward(request, response)
        if response.is_final:
            # Only now, because it may begin a step of this very request, which needs the tensors of this response.
            self._limit.release()

    def _forward(self, request: InferRequest, response: InferResponse) -> None:
        if response.error is not None:
            self._run.fail(self._with_model_name(response.error))
        elif response.outputs or not (self._level is not None or self._has_answered):
            self._has_answered = True
            try:
                values = self._output_values(request, response)
            except SluiceError as error:
                self._run.fail(error)
                return
            self._run.put(self.scope if self._level is None else self.scope.add_child(self._level), values)
        else:
            self._run.send_due()

    def _with_model_name(self, error: SluiceError) -> SluiceError:
        """Add the step's model to an error that says it cannot serve now; a model's own errors stay as they are."""
        name = self._step.model_name
        if error.code not in CANNOT_SERVE or f"'{name}'" in error.message:
            return error
        message = f"model '{name}': {error.message}"
        return error.reworded(message)

    def _output_values(self, request: InferRequest, response: InferResponse) -> dict[str, TensorValue]:
        """Return the step's outputs. One that is absent has no tensor: the next step may not need it."""
        assert self._model is not None
        batch_size = request.batch_size if self._model.spec.max_batch_size > 0 else self._num_rows
        sequence: SequencePosition = response_sequence(response, request_sequence(request))
        values = {name: TensorValue(None, batch_size, sequence) for name in self._step.writes}
        for tensor in response.outputs:
            name = self._step.outputs.get(tensor.name)
            if name is not None:
                values[name] = TensorValue(tensor, batch_size, sequence)
        return values


class EnsembleRun:
    """Starts each step when its last input is available, and ends when no step runs.

    Nothing is polled: the callback of a step's response starts the steps that it makes possible. The first error ends
    the request and cancels all running steps.
    """

    def __init__(self, plan: EnsemblePlan, job: InferJob) -> None:
        """Raises SluiceError where the model of a step is gone."""
        self.plan = plan
        self.job = job
        self.schedule = plan.schedule_for(job.request)
        self.is_over = False
        self._running: set[StepRun] = set()
        self._outer = TensorScope(self.schedule.outer)
        self._sequencer = ResponseSequencer(self._outer)
        self.context = copy_context()
        """The request's own. A step may begin in another's, that of the batch which its last input came from."""
        self.step_models: dict[int, Model] = {}
        """Models by step index, the same throughout the request, also when they are unloaded."""
        self._num_unsent = 0
        """Responses that wait for their turn."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the request. Raises SluiceError, before any step runs, where a step's model is gone or full."""
        try:
            self._hold_models()
        except SluiceError:
            self.release()
            raise
        self.job.on_cancel = self._cancel
        request = self.job.request
        if self.plan.has_overall_timeout and request.timeout_us:
            self._timer = asyncio.get_running_loop().call_later(request.timeout_us / _US_PER_S, self._time_out)
        batch_size = request.batch_size if self.plan.is_batching else 0
        self.put(
            self._outer, {name: TensorValue(request.inputs.get(name), batch_size) for name in self.plan.spec.inputs}
        )

    def _hold_models(self) -> None:
        for step in self.schedule.steps:
            model = self.plan.models.find(step.model_name, step.version)
            model.hold()
            self.step_models[step.index] = model
        for model in self.step_models.values():
            self._refuse_if_full(model)

    def _refuse_if_full(self, model: Model) -> None:
        """Refuse the request before any step runs, so that no step works in vain and the client gets a plain error."""
        try:
            model.refuse_if_full()
        except SluiceError as error:
            message = f"in ensemble '{self.plan.spec.name}', model '{model.name}': {error.message}"
            raise error.reworded(message) from None

    def release(self) -> None:
        """Release the models, when the request has ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        while self.step_models:
            self.step_models.popitem()[1].release()

    def remaining_timeout_us(self) -> int:
        """Return the timeout of a step that starts now; 0 is none."""
        limit_us = self.job.request.timeout_us
        if not self.plan.has_overall_timeout or limit_us == 0:
            return limit_us
        remaining_us = limit_us - (perf_counter_ns() - self.job.started_ns) // _NS_PER_US
        return min(limit_us, max(_US_PER_MS, remaining_us))

    def _time_out(self) -> None:
        names = ", ".join(sorted(f"'{each.model_name}'" for each in self._running))
        limit_s = self.job.request.timeout_us / _US_PER_S
        message = f"model {names}: the request was not complete within its {limit_s:g} s"
        self.fail(SluiceError(ErrorCode.DEADLINE, message))

    def put(self, scope: TensorScope, values: dict[str, TensorValue]) -> None:
        """Add tensors, start the steps that waited for them, and send the responses that are complete."""
        scope.values.update(values)
        ready = [StepRun(self, scope, step) for step in self.schedule.ready_steps(values, scope.values)]
        scope.num_running += len(ready)
        self._running.update(ready)
        outputs = scope.level.outputs
        if any(name in values for name in outputs) and all(name in scope.values for name in outputs):
            scope.response = self._response(scope)
            self._num_unsent += 1
        for step_run in ready:
            step_run.start()
        self.send_due()

    def _response(self, scope: TensorScope) -> InferResponse:
        response = InferResponse()
        for name in scope.level.outputs:
            value, spec = scope.values[name], self.plan.spec.outputs[name]
            if value.tensor is None:
                log.debug("in ensemble '%s': Composing models did not output tensor %s", self.plan.spec.name, name)
                continue
            tensor = fit_shape(
                value.tensor, spec.model_dims, is_batching=self.plan.is_batching, batch_size=value.batch_size
            )
            response.outputs.append(tensor.renamed(name))
            if value.sequence is not None and not response.parameters:
                response.parameters = sequence_parameters(value.sequence)
        return response

    def step_ended(self, step_run: StepRun) -> None:
        """Note that a step gives no more responses."""
        step_run.scope.num_running -= 1
        self._running.discard(step_run)

    def send_due(self) -> None:
        """Send the responses that are due, and end the request where no step runs any more."""
        if self.is_over:
            return
        for response in self._sequencer.due_responses():
            self._num_unsent -= 1
            self.is_over = response.is_final = not self._running and not self._num_unsent
            self.job.respond(response)
            if self.is_over:
                return
        if not self._running:
            self.is_over = True
            self.job.respond(InferResponse())

    def fail(self, error: SluiceError) -> None:
        """End the request with an error and cancel its running steps."""
        if self.is_over:
            return
        self.stop()
        message = f"in ensemble '{self.plan.spec.name}', {error.message}"
        self.job.fail(error.reworded(message))

    def stop(self) -> None:
        self.is_over = True
        for step_run in list(self._running):
            step_run.cancel()

    def _cancel(self) -> None:
        self.stop()
        self.job.respond(InferResponse())
