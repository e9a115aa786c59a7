"""The sequences that wait to be admitted. Used by the engine's thread alone; the clock is passed in."""

import math
from bisect import insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import Generic

from engine.forecast.wait import Backlog
from engine.scheduling.fair_share import Entry, FairShare, Q

MAX_DEAD = 16
"""Entries of those who left that the heap may hold besides as many as live ones."""


class Deadlines:
    """When each of many streams is due; O(log n) a change, and none at all for those without a deadline."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def num_entries(self) -> int:
        """Entries in memory, those of streams that left included."""
        return len(self._heap)

    def add(self, stream_id: int, due: float) -> None:
        """`math.inf`: never."""
        if due != math.inf:
            self._due[stream_id] = due
            heappush(self._heap, (due, stream_id))

    def discard(self, stream_id: int) -> None:
        """Whether it has a deadline or not."""
        if self._due.pop(stream_id, None) is not None and len(self._heap) > 2 * len(self._due) + MAX_DEAD:
            self._heap = [(due, number) for number, due in self._due.items()]
            heapify(self._heap)

    def next(self) -> float:
        """When the next one is due; `math.inf` for never."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take_due(self, now: float) -> list[int]:
        """Those due at `now`, the longest overdue first; they are told once."""
        due: list[int] = []
        while self.next() <= now:
            stream_id = heappop(self._heap)[1]
            del self._due[stream_id]
            due.append(stream_id)
        return due


class WaitingQueue(Generic[Q]):
    """Order of admission: priority (lower first), then fair shares between tenants, then arrival.

    It follows a sequence from `add` to `remove`: `add`, `admit`, perhaps `add_paused` and `admit` again, and `remove`
    when it has ended or is given up, wherever it is then.

    Each priority has counters of its own: classes do not compete (a lower one gets what the higher ones leave), and
    a class that waits behind others would hold the floor down for all. What is left of a class is dropped when nothing
    of it waits or runs.
    """

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self._weights = tenant_weights
        self._classes: dict[int, _Class[Q]] = {}
        self._priorities: list[int] = []
        self._waiting: dict[int, Entry[Q]] = {}
        self._admitted: dict[int, Entry[Q]] = {}
        self._deadlines = Deadlines()
        self._num_arrived = 0
        self.backlog = Backlog()
        """Sums over all that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Q]:
        return self.in_order()

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._waiting

    def get(self, stream_id: int) -> Q | None:
        """The sequence, if it waits."""
        entry = self._waiting.get(stream_id)
        return entry.sequence if entry is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before those that wait bring their first new one."""
        return int(self.backlog.num_tokens)

    @property
    def num_blocks(self) -> int:
        """Most blocks that those who wait can ever hold."""
        return int(self.backlog.num_blocks)

    @property
    def num_admitted(self) -> int:
        """Sequences admitted and neither paused nor removed since."""
        return len(self._admitted)

    def in_order(self) -> Iterator[Q]:
        """Those who wait in the order of admission; lazy, and valid until the queue changes."""
        for priority in self._priorities:
            yield from self._classes[priority].in_order()

    def ahead_of(self, priority: int, tenant: str) -> Backlog:
        """About what would be admitted before a sequence that is added now."""
        ahead = Backlog()
        for other in self._priorities:
            if other < priority:
                ahead = ahead.plus(self._classes[other].backlog)
        own = self._classes.get(priority)
        return ahead.plus(own.ahead_of(tenant)) if own is not None else ahead

    # -- a sequence's way

    def add(self, sequence: Q) -> None:
        """The sequence waits from now on."""
        assert sequence.stream_id not in self._waiting and sequence.stream_id not in self._admitted
        members = self._open(sequence.priority)
        entry = Entry(sequence, self._num_arrived, members.new.tenant(sequence.tenant), Backlog.of(sequence))
        self._num_arrived += 1
        members.new.add(entry)
        self._wait(entry, members, min(sequence.start_deadline, sequence.deadline))

    def add_paused(self, sequence: Q) -> None:
        """An admitted sequence waits again: before all new ones of its priority, and the oldest of the paused first.
        It is not charged again, and its `start_deadline` was met."""
        entry = self._admitted.pop(sequence.stream_id)
        members = self._classes[sequence.priority]
        entry.is_paused, entry.size = True, Backlog.of(sequence)
        insort(members.paused, entry, key=attrgetter("arrival"))
        self._wait(entry, members, sequence.deadline)

    def admit(self, sequence: Q) -> None:
        """The sequence runs from now on. Its prompt is charged, unless it was paused."""
        entry = self._waiting[sequence.stream_id]
        members = self._classes[sequence.priority]
        if not entry.is_paused:
            members.new.start(entry.tenant)
        self._unwait(entry, members)
        if not entry.is_paused:
            entry.tenant.charge(entry.size.num_tokens)
        entry.is_paused = False
        self._admitted[sequence.stream_id] = entry

    def charge(self, sequence: Q, num_tokens: int) -> None:
        """An admitted sequence was served so many output tokens."""
        self._admitted[sequence.stream_id].tenant.charge(num_tokens)

    def remove(self, stream_id: int) -> Q | None:
        """Forget the sequence, waiting or admitted, and return it; None where it is unknown."""
        entry = self._waiting.get(stream_id) or self._admitted.pop(stream_id, None)
        if entry is None:
            return None
        members = self._classes[entry.sequence.priority]
        is_new = stream_id in self._waiting and not entry.is_paused
        if stream_id in self._waiting:
            self._unwait(entry, members)
        if not is_new:
            members.new.stop(entry.tenant)
        self._close_if_idle(entry.sequence.priority)
        return entry.sequence

    # -- deadlines

    def expired(self, now: float) -> list[Q]:
        """Those that wait past their deadline to start or to end. They are told once and stay until removed."""
        return [self._waiting[stream_id].sequence for stream_id in self._deadlines.take_due(now)]

    def next_expiry(self) -> float:
        """When the next is due; `math.inf` for never."""
        return self._deadlines.next()

    # -- both ways alike

    def _wait(self, entry: Entry[Q], members: "_Class[Q]", due: float) -> None:
        self._waiting[entry.sequence.stream_id] = entry
        self.backlog = self.backlog.plus(entry.size)
        members.backlog = members.backlog.plus(entry.size)
        self._deadlines.add(entry.sequence.stream_id, due)

    def _unwait(self, entry: Entry[Q], members: "_Class[Q]") -> None:
        del self._waiting[entry.sequence.stream_id]
        self.backlog = self.backlog.plus(entry.size, -1.0)
        members.backlog = members.backlog.plus(entry.size, -1.0)
        self._deadlines.discard(entry.sequence.stream_id)
        if entry.is_paused:
            members.paused.remove(entry)
        else:
            members.new.remove(entry)

    def _open(self, priority: int) -> "_Class[Q]":
        members = self._classes.get(priority)
        if members is None:
            members = self._classes[priority] = _Class(self._weights)
            insort(self._priorities, priority)
        return members

    def _close_if_idle(self, priority: int) -> None:
        if self._classes[priority].new.is_idle:
            del self._classes[priority]
            self._priorities.remove(priority)


class _Class(Generic[Q]):
    """One priority: the paused sequences, oldest first, then the new ones by fair shares."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.new: FairShare[Q] = FairShare(weights)
        self.paused: list[Entry[Q]] = []
        self.backlog = Backlog()

    def in_order(self) -> Iterator[Q]:
        return chain((entry.sequence for entry in self.paused), self.new.in_order())

    def ahead_of(self, tenant: str) -> Backlog:
        ahead = self.new.ahead_of(tenant)
        for entry in self.paused:
            ahead = ahead.plus(entry.size)
        return ahead
