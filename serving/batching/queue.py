"""The queue before instances, by priority and arrival, with bounds and timeouts; and the timer that wakes its owner."""

import asyncio
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from time import perf_counter_ns

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.plan import BatchPolicy, QueuePolicy, WaitingRequest
from sluice.serving.job import InferJob

_MAX_STALE = 64
"""Deadlines of jobs that have left the queue are swept once there are this many more: they hold tensors."""
_TIMER_NS = 1_000_000
"""Event loops round timers up to a millisecond. A shorter wait polls every turn: queue delays are often 100 us."""


@dataclass(slots=True, eq=False)
class QueuedJob(WaitingRequest):
    """A job in the queue. Times are perf_counter_ns; `deadline_ns` 0 is none. `level` is its priority's queue."""

    job: InferJob
    deadline_ns: int
    level: "_Level"


_Jobs = OrderedDict[InferJob, QueuedJob]


@dataclass(slots=True, eq=False)
class _Level:
    """The queue of one priority: jobs in time, then those that timed out and are served last."""

    priority: int
    policy: QueuePolicy
    in_time: _Jobs = field(default_factory=OrderedDict)
    delayed: _Jobs = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)


class JobQueue:
    """Jobs in the order of service. A long queue does not make adding, taking or removing jobs slower."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._levels: list[_Level] = []
        """Queues by priority, each made with its first job: a configuration may have any number of priorities."""
        self._deadlines: list[tuple[int, int, QueuedJob]] = []
        self._num_added = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueuedJob]:
        """Iterate in the order of service. The queue must not change meanwhile."""
        levels = self._levels
        if len(levels) == 1 and not levels[0].delayed:
            return iter(levels[0].in_time.values())
        return (each for level in levels for jobs in (level.in_time, level.delayed) for each in jobs.values())

    def add(self, job: InferJob, key: object, now_ns: int) -> QueuedJob:
        """Queue a job. Raises UNAVAILABLE where its priority's queue is full."""
        level = self._level(self._policy.priority_of(job.request))
        policy = level.policy
        if policy.max_size and len(level) >= policy.max_size:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"{job.request.log_prefix}Exceeds maximum queue size")
        request = job.request
        queued = QueuedJob(request.batch_size, key, now_ns, job, policy.deadline_ns(request, now_ns), level)
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
        level, job = queued.level, queued.job
        del (level.in_time if job in level.in_time else level.delayed)[job]
        self._size -= 1

    def take(self, count: int) -> list[InferJob]:
        """Remove and return the first `count` jobs."""
        taken: list[InferJob] = []
        for level in self._levels:
            for jobs in (level.in_time, level.delayed):
                while jobs and len(taken) < count:
                    taken.append(jobs.popitem(last=False)[0])
        self._size -= len(taken)
        return taken

    def expire(self, now_ns: int) -> list[InferJob]:
        """Remove and return the jobs that timed out. Those that the policy delays move to the end instead."""
        rejected: list[InferJob] = []
        while (deadline_ns := self.next_deadline_ns()) and deadline_ns <= now_ns:
            queued = heappop(self._deadlines)[2]
            level, job = queued.level, queued.job
            del level.in_time[job]
            if level.policy.delays_expired:
                level.delayed[job] = queued
            else:
                self._size -= 1
                rejected.append(job)
        return rejected

    def next_deadline_ns(self) -> int:
        """Return when the next job times out; 0 for none."""
        deadlines = self._deadlines
        while deadlines and not _is_in_time(deadlines[0][2]):
            heappop(deadlines)
        return deadlines[0][0] if deadlines else 0


def _is_in_time(queued: QueuedJob) -> bool:
    """Return whether the job still waits, and has not timed out."""
    return queued.job in queued.level.in_time


class Wakeup:
    """A timer that calls `wake` at the earliest requested time, or earlier: `wake` requests the next one."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def soon(self) -> None:
        """Wake in the event loop's next turn, after everything that is ready by then."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._wake_soon)

    def at(self, time_ns: int) -> None:
        """Wake at `time_ns` of perf_counter_ns, or earlier."""
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
        """Drop all requested times."""
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
