"""Who is out of time. The clock is passed in."""

import math
from heapq import heapify, heappop, heappush

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
