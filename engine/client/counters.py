"""Arithmetic on the statistics of engines: over those that follow each other, and over those that serve together."""

from collections.abc import Iterable
from functools import reduce

import msgspec

from sluice.engine.histograms import add_packed
from sluice.engine.statistics import EngineStats, HandoverStats, KvTierStats

NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)

_PARTS = ("iteration", "kv_tiers", "handover", "histograms")
"""Fields that are statistics of their own."""
_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
_GAUGES = tuple(n for n in EngineStats.__struct_fields__ if not n.endswith("_total") and n not in _PARTS)
_TIER_COUNTERS = tuple(name for name in KvTierStats.__struct_fields__ if name.endswith("_total"))
_SUMMED = tuple(n for n in _GAUGES if n not in ("predicted_wait_s", "prefill_tokens_per_s", "decode_step_s"))


def add_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return `now` with its counters continued from those of `before`, because exported counters must not decrease."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    tiers = now.kv_tiers
    if tiers is not None and before.kv_tiers is not None:
        counted = {name: getattr(before.kv_tiers, name) + getattr(tiers, name) for name in _TIER_COUNTERS}
        tiers = msgspec.structs.replace(tiers, **counted)
    histograms = add_packed(before.histograms, now.histograms)
    handover = _sum_handovers((before, now))
    return msgspec.structs.replace(now, **sums, kv_tiers=tiers, handover=handover, histograms=histograms)


def without_gauges(stats: EngineStats) -> EngineStats:
    """Return the counters of a lost engine, with all gauges at 0."""
    tiers = stats.kv_tiers
    if tiers is not None:
        tiers = KvTierStats(**{name: getattr(tiers, name) for name in _TIER_COUNTERS})
    return msgspec.structs.replace(stats, **dict.fromkeys(_GAUGES, 0), iteration=None, kv_tiers=tiers)


def sum_stats(each: Iterable[EngineStats], predicted_wait_s: float) -> EngineStats:
    """Return the sums over engines that serve together, as those of one engine with that predicted wait."""
    found = list(each)
    sums = {name: sum(getattr(stats, name) for stats in found) for name in (*_SUMMED, *_COUNTERS)}
    histograms = reduce(add_packed, (stats.histograms for stats in found), b"")
    tiers, handover = _sum_tiers(found), _sum_handovers(found)
    return EngineStats(
        **sums, predicted_wait_s=predicted_wait_s, kv_tiers=tiers, handover=handover, histograms=histograms
    )


def _sum_handovers(found: Iterable[EngineStats]) -> HandoverStats | None:
    each = [stats.handover for stats in found if stats.handover is not None]
    if not each:
        return None
    return HandoverStats(**{name: sum(getattr(e, name) for e in each) for name in HandoverStats.__struct_fields__})


def _sum_tiers(found: Iterable[EngineStats]) -> KvTierStats | None:
    tiers = [stats.kv_tiers for stats in found if stats.kv_tiers is not None]
    if not tiers:
        return None
    sums = {name: sum(getattr(each, name) for each in tiers) for name in KvTierStats.__struct_fields__}
    return KvTierStats(**{**sums, "is_disk_off": any(each.is_disk_off for each in tiers)})
