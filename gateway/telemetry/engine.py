"""The engine's state as Prometheus families, read from its last frame when somebody scrapes."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import EngineStats
from gateway.service import InferenceService

if TYPE_CHECKING:
    from engine.client import EngineClient

_LABELS = ("model",)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("sluice_sequences_running", "Sequences that hold KV blocks and run.", lambda stats: stats.num_running),
    ("sluice_sequences_waiting", "Requests that wait to be admitted.", lambda stats: stats.num_waiting),
    ("sluice_kv_blocks_used", "KV blocks that hold tokens.", lambda stats: stats.num_blocks_used),
    ("sluice_kv_blocks_free", "KV blocks that hold none.", lambda stats: stats.num_blocks_free),
    (
        "sluice_kv_blocks_reserved",
        "KV blocks that the running sequences may come to need, used ones included.",
        lambda stats: stats.num_blocks_reserved,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("sluice_engine_steps", "Steps that the engine ran.", lambda stats: stats.steps_total),
    ("sluice_engine_prompt_tokens", "Prompt tokens that the engine computed.", lambda s: s.prompt_tokens_total),
    ("sluice_engine_generation_tokens", "Tokens that the engine sampled.", lambda s: s.generation_tokens_total),
)


class EngineCollector(Collector):
    """Families of one engine. Its own state goes back as far as its start."""

    def __init__(self, engine: "EngineClient", service: InferenceService, model: str) -> None:
        self._engine = engine
        self._service = service
        self._model = model

    def collect(self) -> Iterable[Metric]:
        stats, label = self._engine.stats, (self._model,)
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(label, value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(label, value(stats))
            yield counter
        yield self._seconds(stats)
        yield from self._health()

    def _seconds(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "sluice_engine_seconds",
            "Time the engine spent in steps: in the model (runner), and on everything else (overhead).",
            labels=(*_LABELS, "part"),
        )
        family.add_metric((self._model, "runner"), stats.runner_seconds_total)
        family.add_metric((self._model, "overhead"), stats.overhead_seconds_total)
        return family

    def _health(self) -> Iterable[Metric]:
        age = GaugeMetricFamily(
            "sluice_engine_heartbeat_age_seconds", "Time since the engine last spoke.", labels=_LABELS
        )
        age.add_metric((self._model,), self._engine.heartbeat_age_s())
        yield age
        yield GaugeMetricFamily("sluice_live", "1 while the engine moves.", value=self._service.is_live())
        yield GaugeMetricFamily("sluice_ready", "1 while new requests are served.", value=self._service.is_ready())
