"""An ensemble as a model."""

from collections.abc import Mapping, Sequence
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.ensemble.graph import Step
from serving.backends.ensemble.run import EnsembleRun, Plan
from serving.batching.scheduled_model import OutputShapes
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse
from sluice.errors import ErrorCode, SluiceError


class EnsembleModel(Model):
    """Hands tensors from model to model as its graph says. It has no queue and no instances: its steps have."""

    def __init__(self, config: ModelConfig, plan: Plan, labels: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(config, plan.spec, labels)
        self._plan = plan
        self._output_shapes = OutputShapes(plan.spec)
        self._runs: dict[InferJob, EnsembleRun] = {}

    @property
    def is_ready(self) -> bool:
        return super().is_ready and all(map(self._is_step_ready, self._plan.graph.steps))

    def _is_step_ready(self, step: Step) -> bool:
        try:
            return self._plan.models.find(step.model_name, step.version).is_ready
        except SluiceError:
            return False

    def is_decoupled_for(self, request: InferRequest) -> bool:
        """Whether a step that is needed for `request` streams for it."""
        try:
            return self.spec.is_decoupled and self._plan.schedule(request).streams
        except SluiceError:  # that a step's model is gone is said to who asks for an answer
            return False

    def _start(self, job: InferJob) -> None:
        job.compute_started_ns = perf_counter_ns()
        run = self._runs[job] = EnsembleRun(self._plan, job)
        job.infer_started_ns = perf_counter_ns()
        try:
            run.start()
        except SluiceError:
            del self._runs[job]
            raise

    def responded(self, job: InferJob, response: InferResponse) -> None:
        """Like Triton, keeps no statistics of single responses."""
        job.infer_ended_ns = perf_counter_ns()
        if self.spec.is_decoupled:
            self.statistics.record_first_response(job, response)
        if self._output_shapes.are_any and response.outputs:
            response.outputs = self._output_shapes.restored(response.outputs)

    def finished(self, job: InferJob) -> None:
        run = self._runs.pop(job, None)
        if run is not None:
            run.release()
        super().finished(job)

    async def close(self) -> None:
        self._is_closing = True
        for run in list(self._runs.values()):
            run.fail(SluiceError(ErrorCode.UNAVAILABLE, f"version {self.version} is unloaded"))
