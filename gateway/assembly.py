"""Puts the server together from its options: repository, service, what answers on the ports."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.grpc.server import GrpcServer
from gateway.http.app import create_app, create_metrics_app
from gateway.http.servers import HttpServer
from gateway.options.config import ServeConfig
from gateway.options.instances import OFF, InstanceOptions
from gateway.options.logging import LoggingOptions
from gateway.options.option import ConfigError
from gateway.options.rag import RagOptions
from gateway.options.trace import TraceOptions
from gateway.service import InferenceService
from gateway.telemetry.engine import EngineCollector
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.page import MetricsPage, latency_options
from gateway.v2.description import PROTOCOL_VERSION, ServerIdentity
from gateway.v2.settings import LogSettings, TraceSetting, TraceSettings
from pipelines.llm.backend import LlmBackend
from pipelines.llm.services import LlmServices
from pipelines.rag.encoder import TextEncoder
from pipelines.rag.library import DocumentLibrary
from pipelines.rag.retriever import RetrieverBackend
from pipelines.rag.stores.opening import open_store
from pipelines.remote.backend import OpenAIBackend
from pipelines.stages.backend import replace_python_stage
from pipelines.text.model import text_model_of
from serving.backend import BackendContext, CustomMetrics, ModelLookup
from serving.backends.registry import BackendRegistry
from serving.batching.rate_limiter import RateLimiter, parse_resources
from serving.caching import open_cache
from serving.caching.response_cache import ResponseCache
from serving.instance import HostPolicy, parse_host_policies
from serving.latencies import LatencyOptions
from serving.repository.loader import LoadHooks
from serving.repository.repository import ModelRepository, RoutedModels
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from gateway.listeners import Listeners

log = logging.getLogger(__name__)


def make_service(config: ServeConfig) -> InferenceService:
    """The service over a repository that has loaded nothing yet. Raises ConfigError for options that cannot be."""
    metrics, shown = GatewayMetrics(), config.metrics.parsed()
    chosen = config.response_cache.parsed()
    cache = open_cache(chosen) if chosen is not None else None
    library = make_library(config.rag, lambda: repository)
    page = MetricsPage(metrics.registry, lambda: repository.models(), shown, cache.usage if cache is not None else None)
    lent = Lent(
        metrics,
        latency_options(shown),
        page.custom if shown.is_allowed else None,
        cache,
        make_rate_limiter(config.instances),
        make_host_policies(config.instances),
        library,
    )
    repository = make_repository(config, lent)
    service = InferenceService(
        repository,
        metrics,
        config.shutdown.heartbeat_timeout_s,
        is_strictly_ready=config.repository.is_strictly_ready,
        identity=ServerIdentity(config.http.server_id, PROTOCOL_VERSION),
        trace=make_trace_settings(config.trace),
        log_settings=make_log_settings(config.logging),
        library=library,
        closes_last=[library.close, page.close, *([cache.close] if cache is not None else [])],
    )
    metrics.registry.register(EngineCollector(service))
    return service


@dataclass(frozen=True, slots=True)
class Lent:
    """What one server has of each, and lends its models."""

    metrics: GatewayMetrics
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    custom_metrics: CustomMetrics | None = None
    response_cache: ResponseCache | None = None
    rate_limiter: RateLimiter | None = None
    host_policies: dict[str, HostPolicy] = field(default_factory=dict)
    library: DocumentLibrary | None = None


def make_library(options: RagOptions, models: Callable[[], ModelLookup]) -> DocumentLibrary:
    """Of the store that is opened when it is first wanted. `models` are asked for when a text is to be encoded.

    Raises ConfigError.
    """
    with _as_config_error():
        store = open_store(options.store_place())
    return DocumentLibrary(store, lambda name: TextEncoder(models(), name), options.library_settings())


def make_rate_limiter(options: InstanceOptions) -> RateLimiter | None:
    """None where nobody limits. Raises ConfigError."""
    with _as_config_error():
        resources = parse_resources(options.resources)
    return None if options.rate_limit == OFF else RateLimiter(resources)


def make_host_policies(options: InstanceOptions) -> dict[str, HostPolicy]:
    """By name. Raises ConfigError."""
    with _as_config_error():
        return parse_host_policies(options.host_policies)


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except SluiceError as error:
        raise ConfigError(error.message) from None


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


def make_repository(config: ServeConfig, lent: Lent) -> ModelRepository:
    """The repository of the folders and stores in `config`; of none, where only MODEL is served."""
    options = config.repository

    def context(models: RoutedModels) -> BackendContext:
        return BackendContext(
            models=models,
            backend_options=options.by_backend(),
            control=models,
            custom_metrics=lent.custom_metrics,
            rate_limiter=lent.rate_limiter,
            response_cache=lent.response_cache,
            host_policies=lent.host_policies,
            latencies=lent.latencies,
        )

    registry = make_registry(config, lent)
    for name in sorted(options.by_backend().keys() - {"", *registry.names}):
        log.warning("--backend-config=%s,... has no effect: backends are %s", name, ", ".join(registry.names))
    return ModelRepository(
        options.paths,
        options.control_mode,
        context,
        poll_s=options.poll_s,
        strict_config=options.is_strict_config,
        registry=registry,
        settings=options.repository_settings(),
        hooks=LoadHooks(
            substitute=replace_python_stage if options.has_native_text_stages else lambda config: config,
            check=text_model_of,
        ),
    )


def make_registry(config: ServeConfig, lent: Lent) -> BackendRegistry:
    """The installed backends; those that need more of the server than every backend does are made here with it."""
    services = LlmServices(
        config.engine, lent.metrics.open_request, config.shutdown.heartbeat_timeout_s, config.request_limits()
    )
    registry = BackendRegistry()
    registry.register(LlmBackend(services), "llm", "tensorrtllm", "vllm")
    registry.register(OpenAIBackend(services))
    registry.register(RetrieverBackend(lent.library))
    return registry


def make_http_servers(service: InferenceService, config: ServeConfig, listeners: "Listeners") -> list[HttpServer]:
    """The protocols' server, which ends first, and the metrics' where they are wanted."""
    servers = [HttpServer(create_app(service, config), listeners.http)]
    if listeners.metrics is not None:
        servers.append(HttpServer(create_metrics_app(service.metrics, config.access), listeners.metrics))
    return servers


def make_grpc_server(service: InferenceService, config: ServeConfig) -> GrpcServer | None:
    """The gRPC server, unless it is not wanted."""
    if not config.grpc.is_allowed:
        return None
    return GrpcServer(service, config.grpc, config.http.host, config.access.api_key)
