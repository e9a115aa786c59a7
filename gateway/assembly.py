"""Puts the server together from its options: repository, service, what answers on the ports."""

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from gateway.config import ServeConfig
from gateway.grpc.server import GrpcServer
from gateway.http.app import create_app, create_metrics_app
from gateway.http.servers import HttpServer
from gateway.log_options import LoggingOptions
from gateway.service import InferenceService
from gateway.telemetry.engine import EngineCollector
from gateway.telemetry.inference import InferenceCollector
from gateway.telemetry.metrics import GatewayMetrics
from gateway.trace_options import TraceOptions
from gateway.v2.description import PROTOCOL_VERSION, ServerIdentity
from gateway.v2.settings import LogSettings, TraceSetting, TraceSettings
from pipelines.backends.base import BackendContext, ModelLookup
from pipelines.repository.repository import ModelRepository

if TYPE_CHECKING:
    from gateway.listeners import Listeners


def make_service(config: ServeConfig) -> InferenceService:
    """The service over a repository that has loaded nothing yet."""
    metrics = GatewayMetrics()
    service = InferenceService(
        make_repository(config, metrics),
        metrics,
        config.shutdown.heartbeat_timeout_s,
        is_strictly_ready=config.repository.is_strictly_ready,
        identity=ServerIdentity(config.http.server_id, PROTOCOL_VERSION),
        trace=make_trace_settings(config.trace),
        log_settings=make_log_settings(config.logging),
    )
    metrics.registry.register(EngineCollector(service))
    metrics.registry.register(InferenceCollector(service.repository.models))
    return service


def make_log_settings(options: LoggingOptions) -> LogSettings:
    """What holds until clients change it."""
    settings = LogSettings(file=options.file)
    if given := options.settings():
        settings.update(given)
    return settings


def make_trace_settings(options: TraceOptions) -> TraceSettings:
    """What holds until clients change it."""
    setting = TraceSetting(options.levels, options.rate, options.count, options.log_frequency)
    return TraceSettings(options.file, setting)


def make_repository(config: ServeConfig, metrics: GatewayMetrics) -> ModelRepository:
    """The repository of the folders in `config`; of none, where only MODEL is served."""
    options = config.repository

    def context(models: ModelLookup) -> BackendContext:
        return BackendContext(
            models=models,
            engine_config=config.engine,
            open_record=metrics.open_request,
            engine_heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s,
            request_limits=config.request_limits(),
            backend_options=options.by_backend(),
        )

    return ModelRepository(
        [Path(path) for path in options.paths],
        options.control_mode,
        context,
        poll_s=options.poll_s,
        strict_config=options.is_strict_config,
    )


def make_http_servers(service: InferenceService, config: ServeConfig, listeners: "Listeners") -> list[HttpServer]:
    """The protocols' server, which ends first, and the metrics'."""
    apps: tuple[ASGIApp, ASGIApp] = (
        create_app(service, config),
        create_metrics_app(service.metrics, config.access),
    )
    return [HttpServer(app, listener) for app, listener in zip(apps, listeners, strict=True)]


def make_grpc_server(service: InferenceService, config: ServeConfig) -> GrpcServer | None:
    """The gRPC server, unless it is not wanted."""
    if not config.grpc.is_allowed:
        return None
    return GrpcServer(service, config.grpc, config.http.host, config.access.api_key)
