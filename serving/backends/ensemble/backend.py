"""The backend `ensemble`, and an ensemble as a model."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from time import perf_counter_ns
from typing import ClassVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.backends.ensemble.graph import (
    EnsembleGraph,
    EnsembleStep,
    check_step_models,
    find_decoupled_steps,
    find_step_models,
    parse_graph,
)
from sluice.serving.backends.ensemble.run import EnsembleRun
from sluice.serving.backends.ensemble.schedule import EnsemblePlan, StepLimit, cache_schedules, parse_step_parameters
from sluice.serving.batching.scheduled_model import OutputShapes
from sluice.serving.config.validation import complete_and_check
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource, build_spec, read_labels


class EnsembleBackend(Backend):
    """Loads ensembles. They have a configuration and no file; the models of their steps are loaded before them."""

    name = "ensemble"
    is_stateless = True
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "instance_group.rate_limiter": "an engine plans its steps itself",
        "instance_group.passive": "it has no instances",
        "response_cache": "every request is computed",
    }

    def check(self, source: ModelSource) -> None:
        """Check what does not depend on the steps' models, which `inspection` knows."""
        complete_and_check(source.config)
        parse_step_parameters(source.config)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load an ensemble. Raises INVALID where steps do not fit. One with a decoupled step is itself decoupled."""
        graph, spec = parse_graph(source.config), build_spec(source.config, source.version)
        step_models = find_step_models(spec.name, graph, context.models)
        check_step_models(spec, graph, step_models)
        decoupled = find_decoupled_steps(spec, graph, step_models)
        config = deepcopy(source.config)
        config.model_transaction_policy.decoupled = bool(decoupled)
        limit = config.ensemble_scheduling.max_inflight_requests
        limits = [StepLimit(limit) for _ in graph.steps]
        spec = build_spec(config, source.version)
        plan = EnsemblePlan(
            spec, graph, decoupled, limits, context.models, cache_schedules(spec, graph), parse_step_parameters(config)
        )
        labels = _labels_of_steps(graph, step_models) | await asyncio.to_thread(read_labels, config, source.folder)
        return EnsembleModel(config, plan, labels)


def _labels_of_steps(graph: EnsembleGraph, models: list[Model]) -> dict[str, list[str]]:
    """Return the labels of the steps' outputs, by ensemble tensor."""
    return {
        tensor: list(models[step.index].labels[output])
        for step in graph.steps
        for output, tensor in step.outputs.items()
        if output in models[step.index].labels
    }


class EnsembleModel(Model):
    """An ensemble. It has neither queue nor instances: the models of its steps have."""

    def __init__(
        self, config: ModelConfig, plan: EnsemblePlan, labels: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        super().__init__(config, plan.spec, labels)
        self._plan = plan
        self._output_shapes = OutputShapes(plan.spec)
        self._runs: dict[InferJob, EnsembleRun] = {}

    @property
    def is_ready(self) -> bool:
        return super().is_ready and all(map(self._is_step_ready, self._plan.graph.steps))

    def _is_step_ready(self, step: EnsembleStep) -> bool:
        try:
            return self._plan.models.find(step.model_name, step.version).is_ready
        except SluiceError:
            return False

    @property
    def step_models(self) -> list[Model]:
        """The models of its steps, as far as they are loaded."""
        found = []
        for step in self._plan.graph.steps:
            with suppress(SluiceError):
                found.append(self._plan.models.find(step.model_name, step.version))
        return found

    def is_decoupled_for(self, request: InferRequest) -> bool:
        """Return whether a step that `request` needs streams."""
        try:
            return self.spec.is_decoupled and self._plan.schedule_for(request).is_streaming
        except SluiceError:  # a missing model is reported when the request is started
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
        """Record the first response. Like Triton, keeps no statistics of the other ones."""
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
