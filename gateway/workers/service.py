"""The service of a worker: the language models that it shares, with keys, quotas and ledger as in the host."""

from dataclasses import replace
from pathlib import Path

from sluice.gateway.accounts import limit_use, make_access, make_ledger, make_prices, open_quotas, write_logs
from sluice.gateway.assembly import SharedResources, make_repository
from sluice.gateway.calls import CallLog, note_cached
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.quotas import MEMORY
from sluice.gateway.options.serving import RepositoryOptions
from sluice.gateway.options.streams import StreamOptions
from sluice.gateway.quotas.store import QuotaStore
from sluice.gateway.service import InferenceService
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.replicas import RoutingCollector
from sluice.gateway.telemetry.routes import RouteCollector
from sluice.gateway.tracer_setup import make_tracer, watch_tracer
from sluice.pipelines.answers.cache import AnswerCache
from sluice.serving.caching import open_cache


def own_config(config: ServeConfig, number: int) -> ServeConfig:
    """Return what of the server's configuration is a worker's: it has no repository and keeps no streams, and its
    request log is its own."""
    ledger = config.ledger
    if ledger.request_log is not None:
        path = Path(ledger.request_log)
        ledger = replace(ledger, request_log=str(path.with_stem(f"{path.stem}-worker-{number}")))
    return replace(config, repository=RepositoryOptions(), streams=StreamOptions(), ledger=ledger)


def make_worker_service(config: ServeConfig, quotas: QuotaStore) -> InferenceService:
    """Build the service. `quotas` are the host's, for use that is counted in memory. Raises OptionError."""
    metrics = GatewayMetrics(targets=config.metrics.targets)
    access = make_access(config)
    calls, prices = CallLog(access), make_prices(config)
    ledger = make_ledger(config, calls, prices)
    cache_settings = config.response_cache.parsed()
    cache = open_cache(cache_settings) if cache_settings is not None else None
    answers = None if cache is None else AnswerCache(cache, note_cached)
    service = InferenceService(
        make_repository(config, SharedResources(metrics)),
        metrics,
        config.shutdown.heartbeat_timeout_s,
        calls=calls,
        ledger=ledger,
        answers=answers,
        tracer=make_tracer(config.tracing),
        closes_last=[each.close for each in (access, cache, ledger) if each is not None],
    )
    watch_tracer(service)
    metrics.registry.register(RouteCollector({}, answers))
    metrics.registry.register(RoutingCollector(service.llms))
    if ledger is not None:
        metrics.registry.register(ledger)
    write_logs(service, config.ledger)
    store = quotas if config.quotas.store == MEMORY else open_quotas(config.quotas)
    limit_use(service, store, config.quotas.default_limits, prices)
    return service
