"""The requests to come: how often those of each priority and tenant do, and which were told to come back."""

import math
from bisect import bisect_right, insort
from collections import OrderedDict
from heapq import heappop, heappush

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


EARLY_S = 0.25
"""A request that comes back so much before its time is taken for punctual."""
LATE_S, LATE_SHARE = 2.0, 0.1
"""A place is kept for so long after its time, in seconds and as a share of the time until then."""
MAX_PROMISES = 4096
RETURN_RATE = 1.0 / 32
"""Weight of the latest promise in the share of requests that come back."""


class PromisedPlaces:
    """The requests that were refused and told when to come back, each known by a key. They stand in line: who is
    refused later is told a later time, and one that comes too early keeps its time. Those that do not come back
    count less and less."""

    def __init__(self) -> None:
        self._due_of: dict[int, list[float]] = {}
        self._due: list[float] = []
        self._ends: list[tuple[float, int, float]] = []
        """When each place is given up, its key and its time; a heap with those of places that were taken too."""
        self._return_share = 1.0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: int, now: float, wait_s: float) -> None:
        """Keep a place for a request that comes back in `wait_s`."""
        if len(self._due) >= MAX_PROMISES:
            return
        due = now + wait_s
        insort(self._due_of.setdefault(key, []), due)
        insort(self._due, due)
        heappush(self._ends, (due + max(LATE_S, LATE_SHARE * wait_s), key, due))

    def due_of(self, key: int) -> float | None:
        """Return when the request was told to come back; None if it was not."""
        times = self._due_of.get(key)
        return times[0] if times else None

    def take(self, key: int) -> None:
        """Give the request its place, as it is back."""
        self._remove(key, self._due_of[key][0])
        self._return_share += RETURN_RATE * (1.0 - self._return_share)

    def expire(self, now: float) -> None:
        """Give up the places of those that have not come back."""
        while self._ends and self._ends[0][0] <= now:
            _, key, due = heappop(self._ends)
            if due in self._due_of.get(key, ()):
                self._remove(key, due)
                self._return_share -= RETURN_RATE * self._return_share

    def num_expected(self, until: float = math.inf) -> int:
        """Return how many are expected back by then."""
        return round(self._return_share * bisect_right(self._due, until))

    def _remove(self, key: int, due: float) -> None:
        times = self._due_of[key]
        times.remove(due)
        if not times:
            del self._due_of[key]
        del self._due[bisect_right(self._due, due) - 1]
