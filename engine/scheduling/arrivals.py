"""Learns how often requests of each priority and tenant come."""

import math
from collections import OrderedDict

PAUSE_GAPS, MIN_PAUSE_S, MAX_PAUSE_S = 16.0, 0.1, 10.0
"""A source pauses that has been silent for so many of its mean gaps, within these seconds."""
FIRST_PAUSE_S = 1.0
"""The same before the gaps are known."""
PRIOR_ARRIVALS = 6.0
"""Arrivals of the present phase that the source's rate in all counts for."""
MEMORY_S = 10.0
"""Time over which arrivals are forgotten."""
MAX_SOURCES = 256


class _Source:
    """The arrivals of one priority and tenant. A phase is a time without a pause."""

    def __init__(self, now: float) -> None:
        self.first = self.phase_began = self.latest = now
        self.num_in_phase = self.num_recent = 0.0

    def pause_s(self) -> float:
        """Return the silence that ends the phase."""
        if self.num_in_phase < 3:
            return FIRST_PAUSE_S
        gap_s = (self.latest - self.phase_began) / (self.num_in_phase - 1)
        return min(max(PAUSE_GAPS * gap_s, MIN_PAUSE_S), MAX_PAUSE_S)

    def observe(self, now: float) -> None:
        if now - self.latest > self.pause_s():
            self.phase_began, self.num_in_phase = now, 0.0
        self.num_recent = self.num_recent * math.exp((self.latest - now) / MEMORY_S) + 1.0
        self.num_in_phase += 1.0
        self.latest = now

    def expect(self, now: float) -> tuple[float, float]:
        age_s = max(now - self.first, 1.0)
        recent = self.num_recent * math.exp((self.latest - now) / MEMORY_S)
        overall = recent / (MEMORY_S * -math.expm1(-age_s / MEMORY_S))
        if now - self.latest > self.pause_s():
            return overall, age_s
        phase_s = now - self.phase_began
        count = self.num_in_phase - 1.0 + PRIOR_ARRIVALS  # the phase begins with one: it says nothing of the gaps
        rate = count / (phase_s + PRIOR_ARRIVALS / max(overall, 1e-9))
        return rate, phase_s + (age_s - phase_s) * PRIOR_ARRIVALS / count


class ArrivalRates:
    """The arrivals in a second of each priority and tenant, of late."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[int, str], _Source] = OrderedDict()

    def observe(self, priority: int, tenant: str, now: float) -> None:
        """Count an arrival."""
        key = (priority, tenant)
        source = self._sources.get(key)
        if source is None or now - source.latest > MAX_PAUSE_S:
            source = self._sources[key] = _Source(now)
            if len(self._sources) > MAX_SOURCES:
                self._sources.popitem(last=False)
        self._sources.move_to_end(key)
        source.observe(now)

    def expect(self, priority: int, tenant: str, now: float) -> tuple[float, float]:
        """Return how many of that tenant come in a second, and for how long that may go on: as long as it has."""
        source = self._sources.get((priority, tenant))
        if source is None or now - source.latest > MAX_PAUSE_S:
            return 0.0, 0.0
        return source.expect(now)

    def sources(self) -> list[tuple[int, str]]:
        """Return the priorities and tenants of which some came."""
        return list(self._sources)
