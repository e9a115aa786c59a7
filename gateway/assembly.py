"""Builds the server from its options: its parts, and the servers of the ports."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from sluice.engine.fleet.client import Engine
from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.api.apis import open_streams
from sluice.gateway.api.app import Protocols, create_app
from sluice.gateway.backends import (
    SharedResources,
    make_host_policies,
    make_library,
    make_rate_limiter,
    make_repository,
)
from sluice.gateway.calls import note_cached
from sluice.gateway.checkpoint import served_name
from sluice.gateway.front.listeners import OtherPorts
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.option import OptionError
from sluice.gateway.options.telemetry import MetricsOptions
from sluice.gateway.plane.rooms import OtherProcesses, Rooms
from sluice.gateway.server import Server, build_server
from sluice.gateway.telemetry.engine import EngineCollector
from sluice.gateway.telemetry.metrics import EventLoopMonitor, GatewayMetrics
from sluice.gateway.telemetry.page import MetricsPage, latency_options
from sluice.gateway.telemetry.replicas import ReplicaCollector, RoutingCollector, ScalePressure, missing_replicas
from sluice.gateway.telemetry.routes import RouteCollector
from sluice.gateway.tenancy.accounts import open_accounts
from sluice.gateway.tenancy.quotas.store import QuotaStore
from sluice.pipelines.answers.cache import AnswerCache
from sluice.pipelines.llm.backend import load_checkpoint
from sluice.serving.caching import open_cache
from sluice.serving.caching.response_cache import ResponseCache


def make_server(
    config: ServeConfig,
    choose_socket: Callable[[], Path | None] = lambda: None,
    elsewhere: OtherProcesses | None = None,
    *,
    quotas: QuotaStore | None = None,
    is_worker: bool = False,
) -> Server:
    """Build the server over a repository that has loaded nothing yet. Raises OptionError.

    `choose_socket` returns where the next engine lets workers attach to it. `quotas` count the use that would be
    counted in memory here. A worker starts no engines, and leaves to its host what is measured once.
    """
    metrics, metrics_settings = GatewayMetrics(targets=config.metrics.targets), config.metrics.parsed()
    if is_worker:
        metrics_settings = replace(metrics_settings, allows_cpu=False, allows_gpu=False)
    rooms, cache = Rooms(metrics.registry), _open_cache(config)
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
        not is_worker,
    )
    repository = make_repository(config, shared)
    rooms.join(close=partial(repository.close, 0))
    accounts = open_accounts(config, rooms, quotas)
    answers = None if cache is None else AnswerCache(cache, note_cached)
    server = build_server(
        config, repository, metrics, rooms, accounts, answers=answers, library=library, elsewhere=elsewhere
    )
    for each in (library, page, cache):
        if each is not None:
            rooms.join(close=each.close)
    if not is_worker:
        rooms.join(EngineCollector(server.plane))
        _watch_replicas(server, config.fleet.scale_wait_target_s)
    rooms.join(RoutingCollector(server.plane.llms))
    rooms.join(RouteCollector(server.plane.routes, answers))
    return server


def _open_cache(config: ServeConfig) -> ResponseCache | None:
    settings = config.response_cache.parsed()
    return None if settings is None else open_cache(settings)


def measure_process(server: Server, options: MetricsOptions, process: str) -> None:
    """Measure the running event loop, which is that of `process`, and push the process' metrics to an OpenTelemetry
    collector, where one is given, until the rooms close. Raises OptionError where the library is missing."""
    monitor = EventLoopMonitor(process)
    monitor.start()
    server.rooms.join(monitor, close=monitor.close)
    if options.otlp_endpoint is None:
        return
    try:
        from sluice.gateway.telemetry.otlp import OtlpPush, open_exporter  # few servers need OpenTelemetry's exporters

        exporter = open_exporter(options.otlp_endpoint, options.otlp_protocol)
    except ImportError as error:
        raise OptionError(
            f"--otlp-metrics-endpoint needs OpenTelemetry ({error}): pip install 'sluice[otel]'"
        ) from None
    push = OtlpPush(server.metrics, process, exporter, options.otlp_interval_s)
    push.start()
    server.rooms.join(close=push.close)


def _watch_replicas(server: Server, scale_wait_target_s: float) -> None:
    """Collect metrics of the replicas of models, and how close each model is to needing more of them."""
    pressure, llms = ScalePressure(scale_wait_target_s), server.plane.llms
    server.rooms.join(
        ReplicaCollector(llms, pressure),
        notice=lambda: missing_replicas(llms()),
        watch=lambda: pressure.observe(llms()),
    )


async def load_model(
    server: Server,
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
        server.metrics.open_request,
        heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s,
        limits=config.request_limits(),
        chat=config.chat_settings(),
    )
    server.plane.repository.add(model)


def make_application(
    server: Server, config: ServeConfig, batches: BatchService | None = None, ports: OtherPorts | None = None
) -> Protocols:
    """Build the application of the protocols. `batches` None: no files and no batches."""
    return create_app(server, config, open_streams(server.rooms, config.streams), batches, ports)
