"""The replicas of models as Prometheus families, and how close a model is to needing more of them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from time import monotonic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.engine.client.base import Replica
from sluice.engine.fleet.client import Engine
from sluice.engine.fleet.handover import HandoverOutcome, PromptHandover, SplitReason
from sluice.gateway.telemetry.families import GAUGE, Declared, Row, read_families
from sluice.pipelines.llm.text import LlmText

WINDOW_S = 60.0
"""How long a predicted wait counts."""
FULL_SHARE = 0.9
"""The share of reserved KV blocks at which a model is as full as it should be."""
WAKE_PRESSURE = 2.0
"""The pressure while requests wait for a first engine: above any target."""
LEAST_PRESSURE = 0.01
"""The pressure on engines that have worked within `WINDOW_S`, so that 0 means that none is needed."""
_LABELS = ("model", "replica")

_GAUGES: tuple[Declared[Replica], ...] = (
    ("sluice_replica_up", "1 while the replica takes requests.", lambda r: r.engine.is_serving and not r.is_leaving),
    ("sluice_replica_sequences_running", "Sequences that run in the replica.", lambda r: r.engine.stats.num_running),
    ("sluice_replica_sequences_waiting", "Requests that wait in the replica.", lambda r: r.engine.stats.num_waiting),
    (
        "sluice_replica_kv_blocks_used",
        "KV blocks that hold tokens of running sequences.",
        lambda r: r.engine.stats.num_blocks_used,
    ),
    (
        "sluice_replica_kv_blocks_reserved",
        "KV blocks that those may come to need.",
        lambda r: r.engine.stats.num_blocks_reserved,
    ),
    ("sluice_replica_kv_blocks_free", "KV blocks that no sequence holds.", lambda r: r.engine.stats.num_blocks_free),
    (
        "sluice_replica_predicted_wait_seconds",
        "How long a request that came to the replica now is thought to wait.",
        lambda r: r.engine.stats.predicted_wait_s,
    ),
    (
        "sluice_replica_heartbeat_age_seconds",
        "Time since the replica last spoke.",
        lambda r: r.engine.heartbeat_age_s(),
    ),
)
_COUNTERS: tuple[Declared[Replica], ...] = (
    (
        "sluice_replica_cached_tokens",
        "Prompt tokens that the replica found in its cache.",
        lambda r: r.engine.stats.cached_tokens_total,
    ),
    ("sluice_replica_restarts", "Engines started in place of a lost one.", lambda r: r.engine.recoveries.num_restarts),
)
_ROUTING: tuple[Declared[Replica], ...] = (
    ("sluice_replica_requests_routed", "Requests that were sent to the replica.", lambda r: r.num_routed),
    (
        "sluice_replica_prompts",
        "Prompts that were sent to the replica for another one to go on with.",
        lambda r: r.num_prefilled,
    ),
    (
        "sluice_replica_migrations",
        "Streams that go on in the replica after another was lost or left.",
        lambda r: r.num_adopted,
    ),
)

LanguageModels = Callable[[], Sequence[LlmText]]


class RoutingCollector(Collector):
    """Collects what this process has sent to which replica. The processes of HTTP workers each have their own."""

    def __init__(self, models: LanguageModels) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        models = self._models()
        yield from read_families("counter", _ROUTING, _LABELS, _replicas(models))
        yield from collect_splits({m.name: m.engine.handover for m in models if m.engine.handover is not None})


class ReplicaCollector(Collector):
    """Collects the families of the replicas of every model that has several, and the pressure on every model."""

    def __init__(self, models: LanguageModels, pressure: "ScalePressure") -> None:
        self._models = models
        self._pressure = pressure

    def collect(self) -> Iterable[Metric]:
        models = self._models()
        replicas = _replicas(models)
        yield from read_families(GAUGE, _GAUGES, _LABELS, replicas)
        yield from read_families("counter", _COUNTERS, _LABELS, replicas)
        text = "How loaded a model is: 1 at the target of the wait, or at nine tenths of the KV blocks reserved."
        family = GaugeMetricFamily("sluice_scale_pressure", text, labels=("model",))
        for model in models:
            family.add_metric((model.name,), self._pressure.of(model.name, model.engine))
        yield family


class ScalePressure:
    """The larger of two shares: the predicted wait, at the 90th percentile of the last minute, of the wait that is the
    target; and the reserved KV blocks of those that should be at most. It is above 0 for a minute after each request,
    and 0 then: nothing needs an engine. While requests wait for a first engine it is `WAKE_PRESSURE`."""

    def __init__(self, target_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._target_s = target_s
        self._clock = clock
        self._waits: dict[str, deque[tuple[float, float]]] = {}
        self._work: dict[str, tuple[int, float]] = {}
        """The tokens that each model has computed so far, and when that was last another number."""

    def observe(self, models: Iterable[LlmText]) -> None:
        """Note the predicted waits of now, to be called about once a second. Models that are gone are forgotten."""
        now, seen = self._clock(), set[str]()
        for model in models:
            seen.add(model.name)
            waits = self._waits.setdefault(model.name, deque())
            if not model.engine.is_asleep:  # waiting for the first engine does not ask for more than one
                waits.append((now, model.engine.stats.predicted_wait_s))
            while waits and waits[0][0] < now - WINDOW_S:
                waits.popleft()
            self._note_work(model.name, model.engine, now)
        for name in self._waits.keys() - seen:
            del self._waits[name], self._work[name]

    def _note_work(self, name: str, engine: Engine, now: float) -> None:
        num_tokens = engine.stats.prompt_tokens_total + engine.stats.generation_tokens_total
        known, _ = self._work.setdefault(name, (num_tokens, -inf))
        if num_tokens != known or engine.stats.num_running:
            self._work[name] = num_tokens, now

    def of(self, name: str, engine: Engine) -> float:
        """Return the pressure on a model."""
        if engine.is_asleep:
            return WAKE_PRESSURE if engine.stats.num_waiting else 0.0
        waits = sorted(wait_s for _, wait_s in self._waits.get(name, ())) or [engine.stats.predicted_wait_s]
        wait_s = waits[ceil(0.9 * len(waits)) - 1]
        num_blocks = engine.info.capacity_blocks
        reserved = engine.stats.num_blocks_reserved / num_blocks if num_blocks else 0.0
        _, worked_at = self._work.get(name, (0, -inf))
        least = LEAST_PRESSURE if self._clock() - worked_at <= WINDOW_S else 0.0
        return max(wait_s / self._target_s, reserved / FULL_SHARE, least)


def missing_replicas(models: Iterable[LlmText]) -> str:
    """Say which replicas do not serve, of models that others serve; "" where there are none."""
    problems = []
    for model in models:
        if model.engine.is_asleep:
            problems.append(_sleep(model.name, model.engine))
            continue
        states = {each.name: _state(each) for each in model.engine.replicas if each.name}
        missing = ", ".join(f"replica {name} {state}" for name, state in states.items() if state)
        if missing:
            num_serving = sum(not state for state in states.values())
            problems.append(f"{num_serving} of {len(states)} replicas serve {model.name}: {missing}")
    return "; ".join(problems)


def _sleep(name: str, fleet: Engine) -> str:
    if not fleet.num_held:
        return f"{name} is asleep: it has no engine until requests come"
    return f"{name} is waking: {fleet.num_held} requests wait for its first engine, for {fleet.waking_s:.0f} s so far"


def _state(replica: Replica) -> str:
    """Return what keeps a replica from serving; "" for nothing."""
    if replica.engine.failure is not None:
        return "is given up"
    if not replica.engine.is_serving:
        return "is restarting"
    return "takes no new requests" if replica.is_leaving else ""


def _replicas(models: Iterable[LlmText]) -> dict[Row, Replica]:
    """Return the replicas by model and name. Of two of one name, one leaves; the other is named."""
    return {(model.name, each.name): each for model in models for each in model.engine.replicas if each.name}


def collect_splits(handovers: Mapping[str, PromptHandover]) -> Iterator[Metric]:
    """Yield what was decided about prompts of fleets with prefill replicas, by model, and how that ended."""
    decided = CounterMetricFamily(
        "sluice_prompt_splits",
        "Prompts by whether a prefill replica was to compute them (split), or why not.",
        labels=("model", "reason"),
    )
    ended = CounterMetricFamily(
        "sluice_prompt_handovers",
        "Prompts that prefill replicas were to compute, by how that ended.",
        labels=("model", "outcome"),
    )
    for model, handover in handovers.items():
        if handover.has_prefill_replicas:
            for reason in SplitReason:
                decided.add_metric((model, reason.value), handover.decisions[reason])
            for outcome in HandoverOutcome:
                ended.add_metric((model, outcome.value), handover.outcomes[outcome])
    yield decided
    yield ended
