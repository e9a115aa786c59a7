"""One request under way in an ensemble."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import ModelLookup
from pipelines.backends.ensemble.graph import Graph, Step
from pipelines.backends.ensemble.limits import StepLimit
from pipelines.backends.ensemble.parameters import StepParameters
from pipelines.backends.ensemble.schedule import Schedule, Schedules
from pipelines.backends.ensemble.sequences import as_parameters
from pipelines.backends.ensemble.shapes import fitted
from pipelines.backends.ensemble.step_run import StepRun
from pipelines.backends.ensemble.waves import Turns, Value, Wave
from pipelines.inference.job import Job
from pipelines.inference.model import Model
from pipelines.inference.spec import ModelSpec
from pipelines.inference.types import InferRequest, InferResponse

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

    def __init__(self, plan: Plan, job: Job) -> None:
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
