"""The KV tiers of engines as Prometheus families: blocks in host memory and on disk."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sluice.engine.statistics import KvTierStats

_Read = Callable[[KvTierStats], float]
_Family = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, str, Mapping[str, _Read]]
"""A family: its kind, name, help text, the label besides the model ("" for none), and what is read for its values."""

_FAMILIES: tuple[_Family, ...] = (
    (
        GaugeMetricFamily,
        "sluice_kv_tier_blocks",
        "KV blocks that a tier beside the KV cache holds.",
        "tier",
        {"host": lambda s: s.host_blocks, "disk": lambda s: s.disk_blocks},
    ),
    (
        GaugeMetricFamily,
        "sluice_kv_tier_capacity_blocks",
        "KV blocks that the tier has room for.",
        "tier",
        {"host": lambda s: s.host_capacity, "disk": lambda s: s.disk_capacity},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_stored_blocks",
        "KV blocks that were copied to the tier.",
        "tier",
        {"host": lambda s: s.host_stored_total, "disk": lambda s: s.disk_stored_total},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_lost_blocks",
        "KV blocks that there was no time to copy to the tier, or that are computed faster than copied.",
        "tier",
        {"host": lambda s: s.host_lost_total, "disk": lambda s: s.disk_lost_total},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_hit_blocks",
        "KV blocks that came back to the KV cache from the tier.",
        "tier",
        {"host": lambda s: s.host_hits_total, "disk": lambda s: s.disk_hits_total},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_restored_tokens",
        "Prompt tokens whose KV blocks came back.",
        "",
        {"": lambda s: s.restored_tokens_total},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_restore_seconds",
        "Time that steps waited for KV blocks to be copied back.",
        "",
        {"": lambda s: s.restore_seconds_total},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_skipped_prefixes",
        "Prefixes that did not come back: computing them was faster (slower), or reading them took too long (late).",
        "reason",
        {"slower": lambda s: s.slower_total, "late": lambda s: s.late_total},
    ),
    (
        CounterMetricFamily,
        "sluice_kv_tier_damaged_blocks",
        "KV blocks whose content on disk was not what had been written; they are computed again.",
        "",
        {"": lambda s: s.disk_damaged_total},
    ),
    (
        GaugeMetricFamily,
        "sluice_kv_tier_disk_off",
        "1 once an error of the disk has turned its tier off.",
        "",
        {"": lambda s: s.is_disk_off},
    ),
)


def collect_kv_tiers(stats: Mapping[str, KvTierStats]) -> Iterator[Metric]:
    """Yield the families of the engines that have tiers, `stats` by model."""
    for kind, name, text, label, reads in _FAMILIES:
        family = kind(name, text, labels=("model", label) if label else ("model",))
        for model, state in stats.items():
            for value, read in reads.items():
                family.add_metric((model, value) if label else (model,), read(state))
        yield family
