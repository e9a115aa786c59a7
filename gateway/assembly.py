"""Builds the server from its options: repository, service, and the servers of the ports."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from sluice.engine.client.interface import Engine
from sluice.errors import SluiceError
from sluice.gateway.accounts import limit_use, make_access, make_ledger, make_prices, open_quotas, write_logs
from sluice.gateway.batches.service import BatchService
from sluice.gateway.calls import CallLog, note_cached
from sluice.gateway.checkpoint import served_name
from sluice.gateway.grpc.server import GrpcServer
from sluice.gateway.http.app import create_app
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.option import OptionError, as_option_error
from sluice.gateway.options.rag import RagOptions
from sluice.gateway.options.serving import OFF, InstanceOptions
from sluice.gateway.options.telemetry import LoggingOptions, MetricsOptions
from sluice.gateway.service import InferenceService
from sluice.gateway.telemetry.engine import EngineCollector
from sluice.gateway.telemetry.event_loop import EventLoopMonitor
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.page import MetricsPage, latency_options
from sluice.gateway.telemetry.replicas import ReplicaCollector, RoutingCollector, ScalePressure, missing_replicas
from sluice.gateway.telemetry.routes import RouteCollector
from sluice.gateway.tracer_setup import make_trace_settings, make_tracer, watch_tracer
from sluice.gateway.v2.log_settings import LogSettings
from sluice.gateway.v2.server import PROTOCOL_VERSION, ServerIdentity
from sluice.pipelines.answers.cache import AnswerCache
from sluice.pipelines.llm.backend import LlmBackend, load_checkpoint
from sluice.pipelines.llm.model import embedder_of
from sluice.pipelines.llm.services import LlmServices
from sluice.pipelines.rag.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.llm_encoder import LlmEncoder
from sluice.pipelines.rag.retriever import RetrieverBackend
from sluice.pipelines.rag.stores.opening import open_store
from sluice.pipelines.remote.backend import OpenAIBackend
from sluice.pipelines.routes.settings import ROUTES_FLAG, RouteSettings, read_routes
from sluice.pipelines.stages.backend import replace_python_stage
from sluice.pipelines.text.model import text_model_of
from sluice.serving.backend import BackendContext, CustomMetrics, ModelLookup
from sluice.serving.backends.python.backend import find_python_based
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.batching.rate_limiter import RateLimiter, parse_resources
from sluice.serving.caching import open_cache
from sluice.serving.caching.response_cache import ResponseCache
from sluice.serving.instance import HostPolicy, parse_host_policies
from sluice.serving.latencies import LatencyOptions
from sluice.serving.repository.loader import LoadHooks
from sluice.serving.repository.repository import ModelRepository, RoutedModels

if TYPE_CHECKING:
    from sluice.gateway.listeners import Listeners

log = logging.getLogger(__name__)


def make_service(config: ServeConfig, choose_socket: Callable[[], Path | None] = lambda: None) -> InferenceService:
    """Build the service over a repository that has loaded nothing yet. Raises OptionError.

    `choose_socket` returns where the next engine lets workers attach to it.
    """
    metrics, metrics_settings = GatewayMetrics(targets=config.metrics.targets), config.metrics.parsed()
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
        choose_socket,
    )
    repository = make_repository(config, shared)
    access = make_access(config)
    calls, prices = CallLog(access), make_prices(config)
    ledger = make_ledger(config, calls, prices)
    answers = None if cache is None else AnswerCache(cache, note_cached)
    service = InferenceService(
        repository,
        metrics,
        config.shutdown.heartbeat_timeout_s,
        is_strictly_ready=config.repository.is_strictly_ready,
        identity=ServerIdentity(config.http.server_id, PROTOCOL_VERSION),
        trace=make_trace_settings(config.trace),
        tracer=make_tracer(config.tracing),
        log_settings=make_log_settings(config.logging),
        library=library,
        calls=calls,
        ledger=ledger,
        takes_model_files=config.repository.takes_model_files,
        allows_lora_updates=config.requests.allows_lora_updates,
        allows_client_shm=config.http.allows_client_shm,
        routes=make_routes(config),
        answers=answers,
        closes_last=[each.close for each in (access, library, page, cache, ledger) if each is not None],
    )
    watch_tracer(service)
    service.notices.append(lambda: access.ring.problem)
    if ledger is not None:
        metrics.registry.register(ledger)
        service.notices.append(lambda: ledger.problem)
    metrics.registry.register(EngineCollector(service))
    watch_replicas(service, config.fleet.scale_wait_target_s)
    metrics.registry.register(RouteCollector(service.routes, answers))
    write_logs(service, config.ledger)
    limit_use(service, open_quotas(config.quotas), config.quotas.default_limits, prices)
    return service


def watch_event_loop(service: InferenceService, process: str) -> None:
    """Measure the running event loop, which is that of `process`, until the service closes."""
    monitor = EventLoopMonitor(process)
    monitor.start()
    service.metrics.registry.register(monitor)
    service.close_last(monitor.close)


def push_metrics(service: InferenceService, options: MetricsOptions, process: str) -> None:
    """Push the metrics of this process to an OpenTelemetry collector, where one is given, until the service closes.

    Raises OptionError where the library is missing.
    """
    if options.otlp_endpoint is None:
        return
    try:
        from sluice.gateway.telemetry.otlp import OtlpPush, open_exporter  # few servers need OpenTelemetry's exporters

        exporter = open_exporter(options.otlp_endpoint, options.otlp_protocol)
    except ImportError as error:
        raise OptionError(
            f"--otlp-metrics-endpoint needs OpenTelemetry ({error}): pip install 'sluice[otel]'"
        ) from None
    push = OtlpPush(service.metrics, process, exporter, options.otlp_interval_s)
    push.start()
    service.close_last(push.close)


def watch_replicas(service: InferenceService, scale_wait_target_s: float) -> None:
    """Collect metrics of the replicas of models, and how close each model is to needing more of them."""
    pressure = ScalePressure(scale_wait_target_s)
    registry = service.metrics.registry
    registry.register(ReplicaCollector(service.llms, pressure))
    registry.register(RoutingCollector(service.llms))
    service.watchers.append(lambda: pressure.observe(service.llms()))
    service.notices.append(lambda: missing_replicas(service.llms()))


def make_routes(config: ServeConfig) -> dict[str, RouteSettings]:
    """Read the routes by name. Raises OptionError."""
    path = config.routes.file
    try:
        routes = {} if path is None else read_routes(path)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if config.response_cache.parsed() is None:
        for name in (name for name, route in routes.items() if route.cache):
            message = f"route {name!r}: cache needs a response cache: --cache-config local,size=256000000, or redis"
            raise OptionError(f"{ROUTES_FLAG} {path}: {message}")
    return routes


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
    choose_socket: Callable[[], Path | None] = lambda: None


def make_library(options: RagOptions, models: Callable[[], ModelLookup]) -> DocumentLibrary:
    """Build the library. Its store opens at first use, and `models` is called when a text is encoded.

    Raises OptionError.
    """
    with as_option_error():
        store = open_store(options.store_place())
    return DocumentLibrary(store, lambda name: _find_encoder(models(), name), options.library_settings())


def _find_encoder(models: ModelLookup, name: str) -> TextEncoder | LlmEncoder:
    """Return the encoder of a collection. One that does not serve says so when it is asked for vectors."""
    with suppress(SluiceError):
        text = embedder_of(models.find(name))
        if text is not None:
            return LlmEncoder(text)
    return TextEncoder(models, name)


def make_rate_limiter(options: InstanceOptions) -> RateLimiter | None:
    """Build the rate limiter; None where the rate is not limited. Raises OptionError."""
    with as_option_error():
        resources = parse_resources(options.resources)
    return None if options.rate_limit == OFF else RateLimiter(resources)


def make_host_policies(options: InstanceOptions) -> dict[str, HostPolicy]:
    """Return the host policies by name. Raises OptionError."""
    with as_option_error():
        return parse_host_policies(options.host_policies)


def make_log_settings(options: LoggingOptions) -> LogSettings:
    """Build the log settings that apply until clients change them."""
    settings = LogSettings(file=options.file)
    if changes := options.settings():
        settings.update(changes)
    return settings


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
        config.fleet.routing(),
        shared.choose_socket,
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
    engine: Engine,
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


def make_http_application(
    service: InferenceService, batches: BatchService, config: ServeConfig, listeners: "Listeners"
) -> ASGIApp:
    """Build the application of the protocols."""
    metrics_port = None if listeners.metrics is None else listeners.metrics.getsockname()[1]
    return create_app(service, config, metrics_port, batches)


def make_grpc_server(service: InferenceService, config: ServeConfig) -> GrpcServer | None:
    """Build the gRPC server; None where it is switched off."""
    if not config.grpc.is_allowed:
        return None
    return GrpcServer(service, config.grpc, config.http.host, config.requests.session_headers)
