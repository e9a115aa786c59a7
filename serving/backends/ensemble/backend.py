"""Loads ensembles."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, BackendContext
from serving.backends.ensemble.graph import Graph, graph_of
from serving.backends.ensemble.limits import StepLimit
from serving.backends.ensemble.model import EnsembleModel
from serving.backends.ensemble.parameters import step_parameters_of
from serving.backends.ensemble.run import Plan
from serving.backends.ensemble.schedule import Schedules
from serving.backends.ensemble.step_models import check_step_models, decoupled_steps, find_step_models
from serving.model import Model
from serving.spec import ModelSource, build_spec, read_labels


class EnsembleBackend(Backend):
    """Ensembles have no file, only a configuration; what their steps call is loaded before them."""

    name = "ensemble"
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "instance_group.rate_limiter": "an engine plans its steps itself",
        "instance_group.passive": "it has no instances",
        "response_cache": "every request is computed",
    }

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Raises SluiceError INVALID where the steps do not fit their models.

        An ensemble with a decoupled step is decoupled, whatever its configuration says.
        """
        graph, spec = graph_of(source.config), build_spec(source.config, source.version)
        step_models = find_step_models(spec.name, graph, context.models)
        check_step_models(spec, graph, step_models)
        decoupled = decoupled_steps(spec, graph, step_models)
        config = _with_transaction_policy(source.config, is_decoupled=bool(decoupled))
        limit = config.ensemble_scheduling.max_inflight_requests
        limits = [StepLimit(limit) for _ in graph.steps]
        spec = build_spec(config, source.version)
        plan = Plan(spec, graph, decoupled, limits, context.models, Schedules(spec, graph), step_parameters_of(config))
        labels = _labels_of_steps(graph, step_models) | await asyncio.to_thread(read_labels, config, source.folder)
        return EnsembleModel(config, plan, labels)


def _with_transaction_policy(config: ModelConfig, *, is_decoupled: bool) -> ModelConfig:
    completed = ModelConfig()
    completed.CopyFrom(config)
    completed.model_transaction_policy.decoupled = is_decoupled
    return completed


def _labels_of_steps(graph: Graph, models: list[Model]) -> dict[str, list[str]]:
    """Those of the models' outputs, under the names that they have here."""
    return {
        tensor: list(models[step.index].labels[output])
        for step in graph.steps
        for output, tensor in step.outputs.items()
        if output in models[step.index].labels
    }
