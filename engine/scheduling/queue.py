"""The queue of sequences that wait for admission, and how often more of them come. Used by the engine thread alone; the
clock is passed in."""

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from operator import attrgetter
from typing import Generic, NamedTuple

from sluice.engine.scheduling.fair_share import DEFAULT_WEIGHT, FairShare, Q, QueuedWork, QueueEntry
from sluice.engine.sequence import QueuedSequence

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


MAX_STALE_DEADLINES = 16
"""Entries of removed streams that the heap may hold beyond as many as it has live ones."""

MAX_GROUPS = 32
"""Tenants that a forecast tells apart."""


class WaitingGroup(NamedTuple):
    """Waiting sequences of one priority and tenant."""

    priority: float
    tenant: str
    weight: float
    charged: float
    """Tokens that the tenant was served."""
    waiting: Sequence[QueuedSequence]
    """In order of arrival; the first ones, where very many wait."""
    arrival_rate: float
    """Sequences that are expected in a second."""
    arrival_s: float
    """How long that may go on."""


class WaitingQueue(Generic[Q]):
    """Orders sequences for admission: by priority (lower first), then fair shares between tenants, then arrival.

    It follows a sequence from `add` to `remove`: `add`, `admit`, perhaps `requeue` and `admit` again, and `remove`
    when the sequence has ended or is given up, in whatever state it is then.

    Each priority has counters of its own: classes do not compete (a lower one gets what the higher ones leave), and
    a class that waits behind others would keep the floor low for all. A class is dropped when no sequence of it waits
    or runs.
    """

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self._weights = tenant_weights
        self._classes: dict[int, _PriorityClass[Q]] = {}
        self._priorities: list[int] = []
        self._waiting: dict[int, QueueEntry[Q]] = {}
        self._admitted: dict[int, QueueEntry[Q]] = {}
        self._deadlines = DeadlineHeap()
        self.arrivals = ArrivalRates()
        """Told of each request that may wait."""
        self._num_arrived = 0
        self.work = QueuedWork()
        """The work of all waiting sequences together."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Q]:
        return self.in_order()

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._waiting

    def get(self, stream_id: int) -> Q | None:
        """Return the sequence if it waits."""
        entry = self._waiting.get(stream_id)
        return entry.sequence if entry is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before each waiting sequence has its first new token."""
        return self.work.num_tokens

    def in_order(self) -> Iterator[Q]:
        """Yield the waiting sequences in the order of admission. Lazy, and valid until the queue changes."""
        for priority in self._priorities:
            yield from self._classes[priority].in_order()

    def num_waiting_before(self, priority: int) -> int:
        """Return how many sequences of priorities before the given one wait."""
        return sum(self._classes[each].num_waiting for each in self._priorities if each < priority)

    def num_waiting(self, priority: int, tenant: str) -> int:
        """Return how many sequences of the tenant wait."""
        members = self._classes.get(priority)
        return members.new.num_waiting(tenant) if members is not None else 0

    def groups(self, priority: int, tenant: str, most: int, now: float) -> list[WaitingGroup]:
        """Return the sequences that wait before a new one of the tenant or compete with it, by priority and tenant, its
        own group first. Of a long queue it returns the `most` that go first."""
        own = (priority, tenant)
        keys = {own: list[Q]()}
        for each in islice(self.in_order(), most):
            if each.priority <= priority:
                keys.setdefault((each.priority, each.tenant), []).append(each)
        for key in self.arrivals.sources():
            if key[0] <= priority and len(keys) < MAX_GROUPS:
                keys.setdefault(key, [])
        groups = []
        for (level, name), waiting in islice(keys.items(), MAX_GROUPS):
            members = self._classes.get(level)
            weight = members.new.weight(name) if members is not None else self._weights.get(name, DEFAULT_WEIGHT)
            counter = members.new.counter(name) if members is not None else 0.0
            rate, duration_s = self.arrivals.expect(level, name, now)
            groups.append(WaitingGroup(level, name, weight, counter * weight, waiting, rate, duration_s))
        return groups

    # -- states of a sequence

    def add(self, sequence: Q) -> None:
        """Queue a new sequence."""
        assert sequence.stream_id not in self._waiting and sequence.stream_id not in self._admitted
        members = self._classes.get(sequence.priority)
        if members is None:
            members = self._classes[sequence.priority] = _PriorityClass(self._weights)
            insort(self._priorities, sequence.priority)
        tenant = members.new.tenant(sequence.tenant, sequence.request.weight)
        entry = QueueEntry(sequence, self._num_arrived, tenant, QueuedWork.of(sequence))
        self._num_arrived += 1
        members.new.add(entry)
        self._enqueue(entry, min(sequence.start_deadline, sequence.deadline))

    def requeue(self, sequence: Q) -> None:
        """Queue a preempted sequence before all new ones of its priority, the oldest preempted one first. Its tenant is
        not charged again, and it has met its `start_deadline`."""
        entry = self._admitted.pop(sequence.stream_id)
        members = self._classes[sequence.priority]
        entry.is_preempted, entry.work = True, QueuedWork.of(sequence)
        insort(members.preempted, entry, key=attrgetter("arrival"))
        self._enqueue(entry, sequence.deadline)

    def admit(self, sequence: Q) -> None:
        """Move a waiting sequence to the running ones. Its prompt is charged, unless it was preempted."""
        entry = self._waiting[sequence.stream_id]
        members = self._classes[sequence.priority]
        if not entry.is_preempted:
            members.new.start(entry.tenant)
        self._dequeue(entry, members)
        if not entry.is_preempted:
            entry.tenant.charge(entry.work.num_tokens)
        entry.is_preempted = False
        self._admitted[sequence.stream_id] = entry

    def charge(self, sequence: Q, num_tokens: int) -> None:
        """Charge the output tokens of an admitted sequence to its tenant."""
        self._admitted[sequence.stream_id].tenant.charge(num_tokens)

    def remove(self, stream_id: int) -> Q | None:
        """Forget the sequence, waiting or admitted. Returns it, or None if it is unknown."""
        entry = self._waiting.get(stream_id) or self._admitted.pop(stream_id, None)
        if entry is None:
            return None
        members = self._classes[entry.sequence.priority]
        is_new = stream_id in self._waiting and not entry.is_preempted
        if stream_id in self._waiting:
            self._dequeue(entry, members)
        if not is_new:
            members.new.stop(entry.tenant)
        if members.new.is_idle:
            del self._classes[entry.sequence.priority]
            self._priorities.remove(entry.sequence.priority)
        return entry.sequence

    # -- deadlines

    def expired(self, now: float) -> list[Q]:
        """Return the sequences that wait past a deadline. Each is returned once and stays until it is removed."""
        return [self._waiting[stream_id].sequence for stream_id in self._deadlines.take_due(now)]

    def next_expiry(self) -> float:
        """Return the earliest deadline; `math.inf` without any."""
        return self._deadlines.next()

    # -- bookkeeping of new and preempted sequences alike

    def _enqueue(self, entry: QueueEntry[Q], due: float) -> None:
        self._waiting[entry.sequence.stream_id] = entry
        self._classes[entry.sequence.priority].num_waiting += 1
        self.work = self.work.plus(entry.work)
        self._deadlines.add(entry.sequence.stream_id, due)

    def _dequeue(self, entry: QueueEntry[Q], members: "_PriorityClass[Q]") -> None:
        del self._waiting[entry.sequence.stream_id]
        members.num_waiting -= 1
        self.work = self.work.plus(entry.work, -1)
        self._deadlines.discard(entry.sequence.stream_id)
        if entry.is_preempted:
            members.preempted.remove(entry)
        else:
            members.new.remove(entry)


class _PriorityClass(Generic[Q]):
    """The waiting sequences of one priority: preempted ones first, oldest first, then new ones by fair shares."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.new: FairShare[Q] = FairShare(weights)
        self.preempted: list[QueueEntry[Q]] = []
        self.num_waiting = 0

    def in_order(self) -> Iterator[Q]:
        return chain((entry.sequence for entry in self.preempted), self.new.in_order())


class DeadlineHeap:
    """The deadlines of many streams. A change costs O(log n), and nothing for streams without a deadline."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._due)

    def add(self, stream_id: int, due: float) -> None:
        """Add a stream; `math.inf` means no deadline."""
        if due != math.inf:
            self._due[stream_id] = due
            heappush(self._heap, (due, stream_id))

    def discard(self, stream_id: int) -> None:
        """Remove a stream, whether it has a deadline or not."""
        if self._due.pop(stream_id, None) is not None and len(self._heap) > 2 * len(self._due) + MAX_STALE_DEADLINES:
            self._heap = [(due, number) for number, due in self._due.items()]
            heapify(self._heap)

    def next(self) -> float:
        """Return the earliest deadline; `math.inf` without any."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take_due(self, now: float) -> list[int]:
        """Remove and return the streams due at `now`, the longest overdue first."""
        due: list[int] = []
        while self.next() <= now:
            stream_id = heappop(self._heap)[1]
            del self._due[stream_id]
            due.append(stream_id)
        return due
