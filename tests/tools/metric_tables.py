"""Generates the tables of docs/metrics.md from the families that the server collects."""

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.core import Metric

from sluice.gateway.answers.batches.places import PlaceKeeper
from sluice.gateway.answers.batches.service import BatchCollector
from sluice.gateway.answers.batches.worker import BatchWorker
from sluice.gateway.answers.streams.store import COUNTERS, SharedStore, StreamCollector, StreamLimits, StreamStore
from sluice.gateway.options.telemetry import MetricsSettings
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.telemetry import trt_llm
from sluice.gateway.telemetry.aliases import TABLE, WITHOUT_COUNTERPART
from sluice.gateway.telemetry.engine import EngineCollector
from sluice.gateway.telemetry.machine import GpuProcess, GpuSample, process_memory
from sluice.gateway.telemetry.metrics import EventLoopMonitor, GatewayMetrics
from sluice.gateway.telemetry.page import InferenceCollector
from sluice.gateway.telemetry.replicas import ReplicaCollector, RoutingCollector, ScalePressure
from sluice.gateway.telemetry.routes import RouteCollector
from sluice.gateway.tenancy.ledger.ledger import CallLedger
from sluice.gateway.tenancy.ledger.prices import PriceTable
from sluice.gateway.tenancy.ledger.store import LedgerStore
from sluice.gateway.tenancy.quotas.account import Party
from sluice.gateway.tenancy.quotas.observer import QuotaCollector, QuotaObserver
from sluice.gateway.tenancy.quotas.store import MemoryQuotas
from sluice.gateway.workers.counts import worker_families
from sluice.pipelines.answers.cache import AnswerCache, AnswerCounts
from sluice.pipelines.routes.route import Route
from sluice.pipelines.routes.settings import parse_routes
from sluice.serving.caching.response_cache import LocalCache
from sluice.serving.model import Model
from sluice.serving.statistics import CacheUsage, ModelStatistics
from tests.tools.markdown import code, codes, plain, table

_LOCAL, _REMOTE = CacheUsage(1), CacheUsage(None)
_EVERYTHING = MetricsSettings(has_summaries=True, has_histograms=True)
_GPU = GpuSample("GPU", 0.0, 0, 0, 0.0, 0.0, 0.0, name="", driver_version="", processes=(GpuProcess((1,), 0),))
_OF_EVERY_MODEL = {"model", "version"}
_OF_ONE_SAMPLE = {"le", "quantile"}


def _requests() -> str:
    families = GatewayMetrics().registry.collect()
    return _table((family for family in families if family.name.startswith("sluice_")), _labels)


def _engine() -> str:
    health = SimpleNamespace(is_live=bool, is_ready=bool)
    plane = SimpleNamespace(llms=list, health=health, repository=SimpleNamespace(num_failed_loads={}, models=list))
    return _table(EngineCollector(cast(Plane, plane)).collect(), _labels)


def _replicas() -> str:
    collectors = (ReplicaCollector(list, ScalePressure(1.0)), RoutingCollector(list))
    return _table((family for each in collectors for family in each.collect()), _labels)


def _batches() -> str:
    worker = SimpleNamespace(num_batches=0, num_finished={"completed": 0, "failed": 0})
    places = SimpleNamespace(num_taken=0, num_revoked=0)
    return _table(BatchCollector(cast(BatchWorker, worker), cast(PlaceKeeper, places)).collect(), _labels)


def _ledger() -> str:
    ledger = CallLedger(cast(LedgerStore, None), PriceTable())
    return _table(ledger.collect(), _labels)


def _quotas() -> str:
    store = MemoryQuotas()
    quotas = QuotaObserver(store)
    quotas.refusals["", "", ""] = 1
    store.open(Party("", "", "", requests_per_minute=1))
    return _table(QuotaCollector(quotas).collect(), _labels)


def _routes() -> str:
    settings = parse_routes({"routes": {"r": {"targets": [{"model": "m"}]}}})
    route = Route("r", settings["r"], lambda model, adapter: None)
    route.targets[0].outcomes["ok"] += 1
    answers = AnswerCache(LocalCache())
    answers.counts["m"] = AnswerCounts()
    return _table(RouteCollector([route], answers).collect(), _labels)


def _streams() -> str:
    store = StreamStore(StreamLimits())
    store.shared = cast(SharedStore, SimpleNamespace(problem=""))
    store.counts.update((kind, "") for kind, _, _ in COUNTERS)
    return _table(StreamCollector(store).collect(), _labels)


def _served() -> list[Metric]:
    """Return the families of a server that shows everything, over one model with a cache."""
    statistics = ModelStatistics()
    statistics.cache = _LOCAL
    config = SimpleNamespace(metric_tags={})
    model = SimpleNamespace(name="", config=config, spec=SimpleNamespace(version=1), statistics=statistics)
    collector = InferenceCollector(lambda: [cast(Model, model)], _EVERYTHING, _REMOTE, lambda: [_GPU])
    return [*collector.collect(), *process_memory([("GPU", _GPU.processes)], {1: ""})]


def _families(*prefixes: str) -> str:
    return _table((family for family in _served() if family.name.startswith(prefixes)), _own_labels)


def _trt_llm() -> str:
    labels = {gauge.name: (gauge.label,) for gauge in trt_llm._GAUGES}
    families = trt_llm.TrtLlmCollector(list).collect()
    return _table(families, lambda family: labels.get(family.name, ("response_metric_type",)))


def _aliases(server: str) -> str:
    scheme, rows = TABLE[server]
    constants = ", ".join(f'{name}="{value}"' for name, value in scheme.constants.items())
    return table(
        ("Metric", "Type", "Labels", "From"),
        (
            [
                code(f"{each.name}_total" if each.kind == "counter" else each.name),
                each.kind,
                codes((scheme.model, *([constants] if constants else []), *each.labels)),
                code(each.source),
            ]
            for each in rows
        ),
    )


def _without_counterpart() -> str:
    return "\n".join(f"- `{server}`: {codes(names)}." for server, names in WITHOUT_COUNTERPART.items())


def _own_labels(family: Metric) -> Iterable[str]:
    return [name for name in _labels(family) if name not in _OF_EVERY_MODEL or not family.name.startswith("nv_")]


def _labels(family: Metric) -> Iterable[str]:
    declared: Iterable[str] = getattr(family, "_labelnames", ())
    if declared:
        return declared
    return dict.fromkeys(name for sample in family.samples for name in sample.labels if name not in _OF_ONE_SAMPLE)


def _table(families: Iterable[Metric], labels: Callable[[Any], Iterable[str]]) -> str:
    """Return the table of some families; without the column of labels where none has any."""
    rows = [[code(_exposed(each)), each.type, codes(labels(each)), plain(each.documentation)] for each in families]
    if any(row[2] for row in rows):
        return table(("Metric", "Type", "Labels", "Meaning"), rows)
    return table(("Metric", "Type", "Meaning"), ([name, kind, text] for name, kind, _, text in rows))


def _exposed(family: Metric) -> str:
    """Return a family's name on the page: the library adds an ending to its own counters, not to Triton's."""
    return f"{family.name}_total" if type(family.type) is str and family.type == "counter" else family.name


TABLES: dict[str, Callable[[], str]] = {
    "metrics-requests": _requests,
    "metrics-engine": _engine,
    "metrics-replicas": _replicas,
    "metrics-batches": _batches,
    "metrics-ledger": _ledger,
    "metrics-quotas": _quotas,
    "metrics-event-loop": lambda: _table(EventLoopMonitor("").collect(), _labels),
    "metrics-workers": lambda: _table(worker_families(0, 0), _labels),
    "metrics-routes": _routes,
    "metrics-streams": _streams,
    "metrics-response-cache": partial(_families, "sluice_response_cache"),
    "metrics-inference": partial(_families, "nv_inference"),
    "metrics-cache": partial(_families, "nv_cache"),
    "metrics-machine": partial(_families, "nv_gpu", "nv_energy", "sluice_gpu", "nv_cpu", "nv_pinned"),
    "metrics-trt-llm": _trt_llm,
    **{f"metrics-aliases-{server}": partial(_aliases, server) for server in TABLE},
    "metrics-aliases-absent": _without_counterpart,
}
