"""The requests that wait for an instance: by priority, then by arrival, with bounds and timeouts."""

import asyncio
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter
from time import perf_counter_ns

from serving.batching.plan import BatchPolicy, QueuePolicy
from serving.job import InferJob
from sluice.errors import ErrorCode, SluiceError

_MAX_STALE = 64
"""Deadlines of requests long gone, beyond as many as wait twice over, before they are swept: they hold tensors."""


class QueuedJob:
    """A job in the queue. Times are perf_counter_ns, `deadline_ns` 0 is none; `level` is where it lies."""

    __slots__ = ("deadline_ns", "enqueued_ns", "job", "key", "level", "rows")

    def __init__(self, job: InferJob, key: object, now_ns: int, deadline_ns: int, level: "_Level") -> None:
        self.job = job
        self.key = key
        self.rows = job.request.batch_size
        self.enqueued_ns = now_ns
        self.deadline_ns = deadline_ns
        self.level = level


_Line = OrderedDict[InferJob, QueuedJob]


class _Level:
    """One priority: those in time, then those whose time was up and who are served all the same."""

    __slots__ = ("delayed", "in_time", "policy", "priority")

    def __init__(self, priority: int, policy: QueuePolicy) -> None:
        self.priority = priority
        self.policy = policy
        self.in_time: _Line = OrderedDict()
        self.delayed: _Line = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)

    def line_of(self, job: InferJob) -> _Line:
        return self.in_time if job in self.in_time else self.delayed


class JobQueue:
    """Jobs in the order they are to be served in. Adding, taking and removing take no longer when it is long."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._levels: list[_Level] = []
        """By priority; made when one is first asked for, as a configuration may allow for any number."""
        self._deadlines: list[tuple[int, int, QueuedJob]] = []
        self._num_added = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueuedJob]:
        """In the order of service. The queue must not change meanwhile."""
        levels = self._levels
        if len(levels) == 1 and not levels[0].delayed:
            return iter(levels[0].in_time.values())
        return (each for level in levels for line in (level.in_time, level.delayed) for each in line.values())

    def add(self, job: InferJob, key: object, now_ns: int) -> QueuedJob:
        """Raises SluiceError UNAVAILABLE where its priority's queue is full."""
        level = self._level(self._policy.priority_of(job.request))
        policy = level.policy
        if policy.max_size and len(level) >= policy.max_size:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"{job.request.log_prefix}Exceeds maximum queue size")
        queued = QueuedJob(job, key, now_ns, policy.deadline_ns(job.request, now_ns), level)
        level.in_time[job] = queued
        self._size += 1
        if queued.deadline_ns:
            self._watch(queued)
        return queued

    def _level(self, priority: int) -> _Level:
        for level in self._levels:
            if level.priority == priority:
                return level
        level = _Level(priority, self._policy.queue_of(priority))
        insort(self._levels, level, key=attrgetter("priority"))
        return level

    def _watch(self, queued: QueuedJob) -> None:
        self._num_added += 1
        heappush(self._deadlines, (queued.deadline_ns, self._num_added, queued))
        if len(self._deadlines) > 2 * self._size + _MAX_STALE:
            self._deadlines = [each for each in self._deadlines if _is_in_time(each[2])]
            heapify(self._deadlines)

    def remove(self, queued: QueuedJob) -> None:
        """Take it out of the middle."""
        del queued.level.line_of(queued.job)[queued.job]
        self._size -= 1

    def take(self, count: int) -> list[InferJob]:
        """The first `count`."""
        taken: list[InferJob] = []
        for level in self._levels:
            for line in (level.in_time, level.delayed):
                while line and len(taken) < count:
                    taken.append(line.popitem(last=False)[0])
        self._size -= len(taken)
        return taken

    def expire(self, now_ns: int) -> list[InferJob]:
        """Take out and return those to be refused as their time is up; others whose time is up go to the back."""
        refused: list[InferJob] = []
        while (deadline_ns := self.next_deadline_ns()) and deadline_ns <= now_ns:
            queued = heappop(self._deadlines)[2]
            level, job = queued.level, queued.job
            del level.in_time[job]
            if level.policy.delays_expired:
                level.delayed[job] = queued
            else:
                self._size -= 1
                refused.append(job)
        return refused

    def next_deadline_ns(self) -> int:
        """When the next request's time is up; 0 for none."""
        deadlines = self._deadlines
        while deadlines and not _is_in_time(deadlines[0][2]):
            heappop(deadlines)
        return deadlines[0][0] if deadlines else 0


def _is_in_time(queued: QueuedJob) -> bool:
    """Whether it still waits, and its time is not up."""
    return queued.job in queued.level.in_time


_TIMER_NS = 1_000_000
"""Event loops round timers up to a millisecond. Less is waited for turn by turn: queue delays are often 100 us."""


class Wakeup:
    """Calls `wake` at the earliest of the times asked for. Waking too early is harmless, as `wake` asks anew."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def soon(self) -> None:
        """In the event loop's next turn, after everything that has come by then."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._wake_soon)

    def at(self, time_ns: int) -> None:
        """At `time_ns` of perf_counter_ns, or earlier."""
        if self._soon is not None:
            return
        delay_ns = time_ns - perf_counter_ns()
        if delay_ns < _TIMER_NS:
            self.soon()
        elif self._timer is None or time_ns < self._timer_ns:
            self._cancel_timer()
            self._timer_ns = time_ns
            self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._wake_timer)

    def cancel(self) -> None:
        """Forget all that was asked for."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_soon(self) -> None:
        self._soon = None
        self._wake()

    def _wake_timer(self) -> None:
        self._timer = None
        self._wake()
