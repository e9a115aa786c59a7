"""One request under way in an ensemble."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import SluiceError
from pipelines.backends.base import ModelLookup
from pipelines.backends.ensemble.graph import Graph, Step
from pipelines.backends.ensemble.limits import StepLimit
from pipelines.backends.ensemble.sequences import as_parameters
from pipelines.backends.ensemble.shapes import fitted
from pipelines.backends.ensemble.step_run import StepRun
from pipelines.backends.ensemble.waves import Turns, Value, Wave
from pipelines.inference.job import Job
from pipelines.inference.model import Model
from pipelines.inference.spec import ModelSpec
from pipelines.inference.types import InferResponse


@dataclass(frozen=True, slots=True)
class Plan:
    """What all requests to an ensemble share. `decoupled`: the steps, by index, of decoupled models."""

    spec: ModelSpec
    graph: Graph
    decoupled: frozenset[int]
    limits: Sequence[StepLimit]
    models: ModelLookup

    @property
    def is_batching(self) -> bool:
        return self.spec.max_batch_size > 0


class EnsembleRun:
    """Starts each step when the last of its inputs is there, and ends when no step runs.

    Nothing is polled: a step's response begins what it makes possible within its callback. The first error ends the
    request and cancels every step that runs.
    """

    def __init__(self, plan: Plan, job: Job) -> None:
        self.plan = plan
        self.job = job
        self.is_over = False
        asked = job.request.requested_outputs
        # Last one first, as Triton: who takes outputs by place, not by name, finds the same ones.
        self._outputs = [name for name in reversed(plan.spec.outputs) if not asked or name in asked]
        self._needed = plan.graph.needed_for(self._outputs)
        self._running: set[StepRun] = set()
        self._first = Wave()
        self._turns = Turns(self._first)
        self._held: dict[int, Model] = {}
        """The models of the steps, by the step's index: unloaded ones stay until this request has ended."""
        self._num_unsent = 0
        """Responses that wait for their turn."""

    def start(self) -> None:
        """Begin. Raises SluiceError where the model of a step is gone, before any step runs."""
        try:
            self._hold_models()
        except SluiceError:
            self.release()
            raise
        self.job.on_cancel = self._cancel
        request = self.job.request
        batch_size = request.batch_size if self.plan.is_batching else 0
        self.feed(self._first, {name: Value(request.inputs.get(name), batch_size) for name in self.plan.spec.inputs})

    def _hold_models(self) -> None:
        for step in self.plan.graph.steps:
            if step.index in self._needed:
                model = self.plan.models.find(step.model_name, step.version)
                model.hold()
                self._held[step.index] = model

    def release(self) -> None:
        """The request has ended: its models may go. Idempotent."""
        while self._held:
            self._held.popitem()[1].release()

    def model_of(self, step: Step) -> Model:
        """The model of a step, the same one for all of this request."""
        return self._held[step.index]

    def feed(self, wave: Wave, values: dict[str, Value]) -> None:
        """Put tensors in, start what had waited for them, and send what is complete."""
        wave.values.update(values)
        ready = [StepRun(self, wave, step) for step in self._ready(wave, values)]
        wave.num_running += len(ready)
        self._running.update(ready)
        if any(name in values for name in self._outputs) and all(name in wave.values for name in self._outputs):
            wave.response = self._response(wave)
            self._num_unsent += 1
        for step_run in ready:
            step_run.enter()
        self.settle()

    def _ready(self, wave: Wave, new: Iterable[str]) -> list[Step]:
        readers = {step.index: step for name in new for step in self.plan.graph.readers.get(name, ())}
        return [
            step
            for index, step in sorted(readers.items())
            if index in self._needed and all(name in wave.values for name in step.reads)
        ]

    def _response(self, wave: Wave) -> InferResponse:
        response = InferResponse()
        for name in self._outputs:
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
