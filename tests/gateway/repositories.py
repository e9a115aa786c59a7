"""Repositories and servers for tests that have models in hand, not in folders."""

from functools import partial
from pathlib import Path
from typing import Any

from sluice.engine.client.base import EngineClient
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.server import Server, build_server
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.llm.configuration import add_engine_parameters, default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.serving.backend import BackendContext, ModelLookup
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode


def empty_repository(metrics: GatewayMetrics) -> ModelRepository:
    """Return a repository without folders; `await start()` makes it ready."""

    def context(models: ModelLookup) -> BackendContext:
        return BackendContext(models)

    return ModelRepository((), ControlMode.NONE, context)


def empty_server(config: ServeConfig | None = None, **parts: Any) -> Server:
    """Return a server without ports over an empty repository."""
    metrics = GatewayMetrics()
    repository, rooms = empty_repository(metrics), Rooms(metrics.registry)
    rooms.join(close=partial(repository.close, 0))
    return build_server(config or ServeConfig(), repository, metrics, rooms, **parts)


def llm_model(name: str, checkpoint: Path, engine: EngineClient, metrics: GatewayMetrics) -> LlmModel:
    """Return a language model of the checkpoint over an engine that has started."""
    config = add_engine_parameters(default_llm_config(name), engine.info)
    return LlmModel(config, load_text(LlmText, name, checkpoint, engine, open_record=metrics.open_request), engine)
