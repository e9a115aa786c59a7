"""The engine's counters over the engines that came and went: what is exported must not go backwards."""

import msgspec

from engine.types import EngineStats

NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)

_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
_GAUGES = tuple(n for n in EngineStats.__struct_fields__ if not n.endswith("_total") and n != "iteration")


def add_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """`now` with its counters continued from where those of `before` stopped."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    return msgspec.structs.replace(now, **sums)


def without_gauges(stats: EngineStats) -> EngineStats:
    """The counters of an engine that is gone; it holds nothing any more."""
    return msgspec.structs.replace(stats, **dict.fromkeys(_GAUGES, 0), iteration=None)
