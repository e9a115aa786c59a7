"""Builds the server from its options: repository, service, and the servers of the ports."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.client.base import EngineClient
from gateway.batches.service import BatchService
from gateway.checkpoint import served_name
from gateway.grpc.server import GrpcServer
from gateway.http.app import create_app, create_metrics_app
from gateway.http.server import HttpServer
from gateway.options.config import ServeConfig
from gateway.options.option import OptionError
from gateway.options.rag import RagOptions
from gateway.options.serving import OFF, InstanceOptions
from gateway.options.telemetry import LoggingOptions, TraceOptions
from gateway.service import InferenceService
from gateway.telemetry.engine import EngineCollector
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.page import MetricsPage, latency_options
from gateway.v2.log_settings import LogSettings
from gateway.v2.server import PROTOCOL_VERSION, ServerIdentity
from gateway.v2.trace import TraceSetting, TraceSettings
from pipelines.llm.backend import LlmBackend, load_checkpoint
from pipelines.llm.model import LlmModel
from pipelines.llm.services import LlmServices
from pipelines.rag.encoder import TextEncoder
from pipelines.rag.library import DocumentLibrary
from pipelines.rag.llm_encoder import LlmEncoder
from pipelines.rag.retriever import RetrieverBackend
from pipelines.rag.stores.opening import open_store
from pipelines.remote.backend import OpenAIBackend
from pipelines.stages.backend import replace_python_stage
from pipelines.text.model import text_model_of
from serving.backend import BackendContext, CustomMetrics, ModelLookup
from serving.backends.python.backend import find_python_based
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
    """Build the service over a repository that has loaded nothing yet. Raises OptionError."""
    metrics, metrics_settings = GatewayMetrics(), config.metrics.parsed()
    cache_settings = config.response_cache.parsed()
    cache = open_cache(cache_settings) if cache_settings is not None else None
    library = make_library(config.rag, lambda: repository)
    usage = cache.usage if cache is not None else None
    page = MetricsPage(metrics.registry, lambda: repository.models(), metrics_settings, usage)
    shared = SharedResources(
        metrics,
        latency_options(metrics_settings),
        page.custom if metrics_settings.is_allowed else None,
        cache,
        make_rate_limiter(config.instances),
        make_host_policies(config.instances),
        library,
    )
    repository = make_repository(config, shared)
    service = InferenceService(
        repository,
        metrics,
        config.shutdown.heartbeat_timeout_s,
        is_strictly_ready=config.repository.is_strictly_ready,
        identity=ServerIdentity(config.http.server_id, PROTOCOL_VERSION),
        trace=make_trace_settings(config.trace),
        log_settings=make_log_settings(config.logging),
        library=library,
        takes_model_files=config.repository.takes_model_files,
        allows_client_shm=config.http.allows_client_shm,
        closes_last=[library.close, page.close, *([cache.close] if cache is not None else [])],
    )
    metrics.registry.register(EngineCollector(service))
    return service


@dataclass(frozen=True, slots=True)
class SharedResources:
    """Services of one server that its models share."""

    metrics: GatewayMetrics
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    custom_metrics: CustomMetrics | None = None
    response_cache: ResponseCache | None = None
    rate_limiter: RateLimiter | None = None
    host_policies: dict[str, HostPolicy] = field(default_factory=dict)
    library: DocumentLibrary | None = None


def make_library(options: RagOptions, models: Callable[[], ModelLookup]) -> DocumentLibrary:
    """Build the library. Its store opens at first use, and `models` is called when a text is encoded.

    Raises OptionError.
    """
    with _as_config_error():
        store = open_store(options.store_place())
    return DocumentLibrary(store, lambda name: _find_encoder(models(), name), options.library_settings())


def _find_encoder(models: ModelLookup, name: str) -> TextEncoder | LlmEncoder:
    """Return the encoder of a collection. One that does not serve says so when it is asked for vectors."""
    with suppress(SluiceError):
        model = models.find(name)
        if isinstance(model, LlmModel) and model.text.info.embedding_size:
            return LlmEncoder(model.text)
    return TextEncoder(models, name)


def make_rate_limiter(options: InstanceOptions) -> RateLimiter | None:
    """Build the rate limiter; None where the rate is not limited. Raises OptionError."""
    with _as_config_error():
        resources = parse_resources(options.resources)
    return None if options.rate_limit == OFF else RateLimiter(resources)


def make_host_policies(options: InstanceOptions) -> dict[str, HostPolicy]:
    """Return the host policies by name. Raises OptionError."""
    with _as_config_error():
        return parse_host_policies(options.host_policies)


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except SluiceError as error:
        raise OptionError(error.message) from None


def make_log_settings(options: LoggingOptions) -> LogSettings:
    """Build the log settings that apply until clients change them."""
    settings = LogSettings(file=options.file)
    if changes := options.settings():
        settings.update(changes)
    return settings


def make_trace_settings(options: TraceOptions) -> TraceSettings:
    """Build the trace settings that apply until clients change them."""
    setting = TraceSetting(options.levels, options.rate, options.count, options.log_frequency)
    return TraceSettings(options.file, setting)


def make_repository(config: ServeConfig, shared: SharedResources) -> ModelRepository:
    """Build the repository of the folders and stores in `config`; there are none where only MODEL is served."""
    options = config.repository

    def context(models: RoutedModels) -> BackendContext:
        return BackendContext(
            models=models,
            backend_options=options.by_backend(),
            control=models,
            custom_metrics=shared.custom_metrics,
            rate_limiter=shared.rate_limiter,
            response_cache=shared.response_cache,
            host_policies=shared.host_policies,
            latencies=shared.latencies,
        )

    registry = make_registry(config, shared)
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


def make_registry(config: ServeConfig, shared: SharedResources) -> BackendRegistry:
    """Build the registry of installed backends. Those that need services of the server are made here."""
    services = LlmServices(
        config.engine,
        shared.metrics.open_request,
        config.shutdown.heartbeat_timeout_s,
        config.request_limits(),
        config.chat_settings(),
    )
    registry = BackendRegistry()
    registry.register(LlmBackend(services), "llm", "tensorrtllm", "vllm")
    registry.register(OpenAIBackend(services))
    registry.register(RetrieverBackend(shared.library))
    directory = config.repository.backend_directory
    for name in registry.register_missing(find_python_based(Path(directory))) if directory is not None else ():
        log.warning("--backend-directory: %s/model.py is not used, as Sluice has a backend of that name", name)
    return registry


async def load_model(
    service: InferenceService,
    config: ServeConfig,
    checkpoint: Path,
    engine: EngineClient,
    engine_start: "asyncio.Task[None]",
) -> None:
    """Load MODEL, whose engine starts meanwhile, and test it with one token. Raises SluiceError."""
    model = await load_checkpoint(
        served_name(config.model.served_model_name, checkpoint),
        checkpoint,
        engine,
        engine_start,
        service.metrics.open_request,
        heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s,
        limits=config.request_limits(),
        chat=config.chat_settings(),
    )
    service.repository.add(model)


def make_http_servers(
    service: InferenceService, batches: BatchService, config: ServeConfig, listeners: "Listeners"
) -> list[HttpServer]:
    """Build the protocols' server, which ends first, and the metrics' server, where there is one."""
    metrics_port = None if listeners.metrics is None else listeners.metrics.getsockname()[1]
    servers = [HttpServer(create_app(service, config, metrics_port, batches), listeners.http)]
    if listeners.metrics is not None:
        servers.append(HttpServer(create_metrics_app(service.metrics, config.access), listeners.metrics))
    return servers


def make_grpc_server(service: InferenceService, config: ServeConfig) -> GrpcServer | None:
    """Build the gRPC server; None where it is switched off."""
    if not config.grpc.is_allowed:
        return None
    return GrpcServer(service, config.grpc, config.http.host, config.access.api_key)
