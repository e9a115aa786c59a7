"""The engine's state as Prometheus families, read from its last frame at each scrape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.engine.fleet.client import Engine
from sluice.engine.statistics import BOUNDS, EngineStats, HandoverStats, KvTierStats, unpack
from sluice.engine.types import EngineInfo
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.telemetry.families import (
    GAUGE,
    BucketFamily,
    Declared,
    DeclaredParts,
    Row,
    read_families,
    read_parts,
)

_LABELS = ("model",)
_INFO = (
    *("runtime", "runtime_version", "model_type", "dtype", "quantization", "kv_cache_dtype", "scheduler_policy"),
    "num_gpus",
)
"""Fields of `EngineInfo` that are labels."""

_HISTOGRAM_TEXTS = {
    "step_seconds": "Time of a step: the model, and everything else.",
    "step_sequences": "Sequences in a step: the size of its batch.",
    "step_tokens": "Tokens that a step runs: prompt tokens, and one for each sequence that decodes, with its drafts.",
    "queue_seconds": "From a request's submission to its admission.",
    "prefill_seconds": "From a request's admission to its first token.",
}
_GAUGES: tuple[Declared[EngineStats], ...] = (
    ("sluice_sequences_running", "Sequences that hold KV blocks and run.", lambda s: s.num_running),
    ("sluice_sequences_waiting", "Requests that wait to be admitted.", lambda s: s.num_waiting),
    ("sluice_tokens_waiting", "Prompt tokens of the requests that wait.", lambda s: s.num_tokens_waiting),
    ("sluice_kv_blocks_used", "KV blocks that hold tokens of running sequences.", lambda s: s.num_blocks_used),
    ("sluice_kv_blocks_free", "KV blocks that no sequence holds.", lambda s: s.num_blocks_free),
    ("sluice_kv_blocks_cached", "Free KV blocks that hold a reusable prefix.", lambda s: s.num_blocks_cached),
    (
        "sluice_kv_blocks_reserved",
        "KV blocks that the running sequences may come to need, used ones included.",
        lambda s: s.num_blocks_reserved,
    ),
    (
        "sluice_predicted_wait_seconds",
        "How long a request that came now is thought to wait.",
        lambda s: s.predicted_wait_s,
    ),
    (
        "sluice_engine_prefill_tokens_per_second",
        "Prompt tokens that an engine computes in a second beside what runs; 0 before it has learned that.",
        lambda s: s.prefill_tokens_per_s,
    ),
)
_COUNTERS: tuple[Declared[EngineStats], ...] = (
    ("sluice_engine_steps", "Steps that the engine ran.", lambda s: s.steps_total),
    ("sluice_engine_prompt_tokens", "Prompt tokens that the engine computed.", lambda s: s.prompt_tokens_total),
    ("sluice_engine_cached_tokens", "Prompt tokens found in the cache.", lambda s: s.cached_tokens_total),
    ("sluice_engine_generation_tokens", "Tokens that the engine sampled.", lambda s: s.generation_tokens_total),
    ("sluice_engine_preemptions", "Running sequences paused for want of KV blocks.", lambda s: s.preemptions_total),
    (
        "sluice_engine_recomputed_tokens",
        "Tokens computed again after a pause.",
        lambda s: s.recomputed_tokens_total,
    ),
    ("sluice_engine_draft_tokens", "Draft tokens that speculation proposed.", lambda s: s.draft_tokens_total),
    ("sluice_engine_accepted_tokens", "Draft tokens that the model agreed with.", lambda s: s.accepted_tokens_total),
    ("sluice_engine_timeouts", "Requests that ended at a deadline.", lambda s: s.timeouts_total),
    ("sluice_engine_waits", "Requests that were admitted.", lambda s: s.waits_total),
    ("sluice_engine_wait_seconds", "Time that admitted requests waited.", lambda s: s.wait_seconds_total),
    (
        "sluice_engine_wait_error_seconds",
        "By how much the predicted waits of admitted requests were off, either way.",
        lambda s: s.wait_error_seconds_total,
    ),
)

_SUPERVISION: tuple[Declared[Engine], ...] = (
    ("sluice_engine_restarts", "Engines started in place of a lost one.", lambda e: e.recoveries.num_restarts),
    ("sluice_engine_recovery_seconds", "Time from losing engines to new ones.", lambda e: e.recoveries.seconds_total),
    ("sluice_engine_resumed_requests", "Requests that went on in a new engine.", lambda e: e.recoveries.num_resumed),
    (
        "sluice_engine_poisoned_requests",
        "Requests failed as engines crashed on them.",
        lambda e: e.recoveries.num_poisoned,
    ),
)

_LIMITS: tuple[Declared[EngineInfo], ...] = (
    ("sluice_engine_load_seconds", "Time that the engine took to load its model.", lambda i: i.load_seconds),
    ("sluice_engine_max_num_seqs", "Most sequences in one step.", lambda i: i.max_num_seqs),
    ("sluice_engine_max_num_batched_tokens", "Most tokens in one step.", lambda i: i.max_num_batched_tokens),
    ("sluice_engine_max_model_len", "Longest prompt and output of one request together.", lambda i: i.max_model_len),
    ("sluice_kv_blocks", "KV blocks that the engine has.", lambda i: i.capacity_blocks),
    ("sluice_kv_block_tokens", "Tokens that a KV block holds.", lambda i: i.block_size),
    ("sluice_engine_adapters", "LoRA adapters that requests may use.", lambda i: len(i.adapters)),
)

_LIVENESS: tuple[Declared[Engine], ...] = (
    ("sluice_engine_heartbeat_age_seconds", "Time since the engine last spoke.", lambda e: e.heartbeat_age_s()),
    ("sluice_engine_last_recovery_seconds", "Time that the last recovery took.", lambda e: e.recoveries.last_s),
)
_SECONDS: tuple[DeclaredParts[EngineStats], ...] = (
    (
        "counter",
        "sluice_engine_seconds",
        "Time the engine spent in steps: in the model (runner), and on everything else (overhead).",
        "part",
        {"runner": lambda s: s.runner_seconds_total, "overhead": lambda s: s.overhead_seconds_total},
    ),
)
KV_TIERS: tuple[DeclaredParts[KvTierStats], ...] = (
    (
        GAUGE,
        "sluice_kv_tier_blocks",
        "KV blocks that a tier beside the KV cache holds.",
        "tier",
        {"host": lambda s: s.host_blocks, "disk": lambda s: s.disk_blocks},
    ),
    (
        GAUGE,
        "sluice_kv_tier_capacity_blocks",
        "KV blocks that the tier has room for.",
        "tier",
        {"host": lambda s: s.host_capacity, "disk": lambda s: s.disk_capacity},
    ),
    (
        "counter",
        "sluice_kv_tier_stored_blocks",
        "KV blocks that were copied to the tier.",
        "tier",
        {"host": lambda s: s.host_stored_total, "disk": lambda s: s.disk_stored_total},
    ),
    (
        "counter",
        "sluice_kv_tier_lost_blocks",
        "KV blocks that there was no time to copy to the tier, or that are computed faster than copied.",
        "tier",
        {"host": lambda s: s.host_lost_total, "disk": lambda s: s.disk_lost_total},
    ),
    (
        "counter",
        "sluice_kv_tier_hit_blocks",
        "KV blocks that came back to the KV cache from the tier.",
        "tier",
        {"host": lambda s: s.host_hits_total, "disk": lambda s: s.disk_hits_total},
    ),
    (
        "counter",
        "sluice_kv_tier_restored_tokens",
        "Prompt tokens whose KV blocks came back.",
        "",
        {"": lambda s: s.restored_tokens_total},
    ),
    (
        "counter",
        "sluice_kv_tier_restore_seconds",
        "Time that steps waited for KV blocks to be copied back.",
        "",
        {"": lambda s: s.restore_seconds_total},
    ),
    (
        "counter",
        "sluice_kv_tier_skipped_prefixes",
        "Prefixes that did not come back: computing them was faster (slower), or reading them took too long (late).",
        "reason",
        {"slower": lambda s: s.slower_total, "late": lambda s: s.late_total},
    ),
    (
        "counter",
        "sluice_kv_tier_damaged_blocks",
        "KV blocks whose content on disk was not what had been written; they are computed again.",
        "",
        {"": lambda s: s.disk_damaged_total},
    ),
    (
        GAUGE,
        "sluice_kv_tier_disk_off",
        "1 once an error of the disk has turned its tier off.",
        "",
        {"": lambda s: s.is_disk_off},
    ),
)
HANDOVERS: tuple[DeclaredParts[HandoverStats], ...] = (
    (
        "counter",
        "sluice_kv_handover_blocks",
        "KV blocks that engines have sent to others, and those that they got.",
        "direction",
        {"sent": lambda s: s.sent_blocks_total, "received": lambda s: s.received_blocks_total},
    ),
    (
        "counter",
        "sluice_kv_handover_bytes",
        "Bytes of those blocks.",
        "direction",
        {"sent": lambda s: s.sent_bytes_total, "received": lambda s: s.received_bytes_total},
    ),
    (
        "counter",
        "sluice_kv_handover_seconds",
        "Time that steps waited for copies of what was sent, and time from asking for blocks to the last of them.",
        "direction",
        {"sent": lambda s: s.send_seconds_total, "received": lambda s: s.receive_seconds_total},
    ),
    (
        "counter",
        "sluice_kv_handover_missing_blocks",
        "KV blocks that the other engine no longer had.",
        "",
        {"": lambda s: s.missing_blocks_total},
    ),
    (
        "counter",
        "sluice_kv_handover_failures",
        "Times that an engine was asked for blocks and refused, or did not answer in time.",
        "",
        {"": lambda s: s.failed_total},
    ),
    (
        "counter",
        "sluice_kv_handover_late_prompts",
        "Prompts that were computed after all, because their blocks had not come in time.",
        "",
        {"": lambda s: s.late_total},
    ),
)


class NamedEngine(NamedTuple):
    """A loaded engine with the model's name and version that its samples have."""

    model: str
    version: str
    engine: Engine
    info: EngineInfo


class EngineCollector(Collector):
    """Collects the families of every loaded language model's engine, and of the server as a whole.

    An engine's own state goes back as far as its start.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def collect(self) -> Iterable[Metric]:
        yield from engine_families(
            [NamedEngine(llm.name, llm.version, llm.engine, llm.info) for llm in self._plane.llms()]
        )
        failures = "Versions and configurations of the repository that could not be loaded."
        counts: dict[Row, int] = {(model,): count for model, count in self._plane.repository.num_failed_loads.items()}
        yield from read_families("counter", [("sluice_model_load_failures", failures, int)], _LABELS, counts)
        yield GaugeMetricFamily("sluice_live", "1 until an engine is given up.", value=self._plane.health.is_live())
        yield GaugeMetricFamily("sluice_ready", "1 while new requests are served.", value=self._plane.health.is_ready())


def engine_families(named: Sequence[NamedEngine]) -> Iterator[Metric]:
    """Yield the families of engines, one sample for each model."""
    engines: dict[Row, Engine] = {(each.model,): each.engine for each in named}
    stats = {row: engine.stats for row, engine in engines.items()}
    infos: dict[Row, EngineInfo] = {(each.model,): each.info for each in named}
    yield from read_families(GAUGE, _GAUGES, _LABELS, stats)
    yield from read_families("counter", _COUNTERS, _LABELS, stats)
    yield from read_families("counter", _SUPERVISION, _LABELS, engines)
    tiers = {row: state.kv_tiers for row, state in stats.items() if state.kv_tiers is not None}
    yield from read_parts(KV_TIERS, tiers)
    handovers = {row: state.handover for row, state in stats.items() if state.handover is not None}
    yield from read_parts(HANDOVERS, handovers)
    yield from read_families(GAUGE, _LIVENESS, _LABELS, engines)
    yield from read_families(GAUGE, _LIMITS, _LABELS, infos)
    yield _info(named)
    yield from read_parts(_SECONDS, stats)
    yield from _histograms(stats)


def _info(named: Iterable[NamedEngine]) -> Metric:
    family = GaugeMetricFamily(
        "sluice_engine_info", "1 for each model: what its engine is.", labels=(*_LABELS, "version", *_INFO)
    )
    for each in named:
        family.add_metric((each.model, each.version, *(str(getattr(each.info, name)) for name in _INFO)), 1)
    return family


def _histograms(stats: Mapping[Row, EngineStats]) -> list[Metric]:
    families = {
        name: BucketFamily(f"sluice_engine_{name}", _HISTOGRAM_TEXTS[name], bounds, _LABELS)
        for name, bounds in BOUNDS.items()
    }
    for row, state in stats.items():
        for name, histogram in unpack(state.histograms).items():
            families[name].add(row, histogram)
    return [*families.values()]
