"""Which of the waiting requests become the next batch, and when to look again. Pure: no clock, no effects."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from serving.batching.policy import BatchPolicy


class Waiting(Protocol):
    """A request in the queue, as the decision sees it."""

    @property
    def rows(self) -> int: ...

    @property
    def key(self) -> object:
        """Requests with equal keys may share a batch."""

    @property
    def enqueued_ns(self) -> int: ...


class BatchPlan(NamedTuple):
    """Take the first `size` requests of the queue; where that is 0, look again at `look_again_ns`."""

    size: int
    look_again_ns: int = 0


class _Front(NamedTuple):
    """What stands at the front of the queue and could be one batch: so many requests, of so many rows."""

    size: int
    rows: int
    oldest_ns: int
    is_closed: bool
    """Whether the request behind it cannot join, so that waiting makes it no larger."""
    preferred: int
    """How many of its requests make a batch to send without delay; 0 for none."""


def plan_batch(waiting: Iterable[Waiting], policy: BatchPolicy, now_ns: int) -> BatchPlan:
    """What to do when an instance is free.

    Triton's rules: the largest preferred batch at the front goes at once. Else the front waits for more until its
    oldest request has waited for the delay, unless it cannot grow. Once the delay is over, everything that fits goes.
    No request is split, and none overtakes another.
    """
    front = _front_of(waiting, policy)
    if front.size == 0:
        return BatchPlan(0)
    due_ns = front.oldest_ns + policy.delay_ns
    is_late = policy.delay_ns > 0 and now_ns >= due_ns
    if front.preferred and not is_late:
        return BatchPlan(front.preferred)
    if is_late or policy.delay_ns == 0 or front.is_closed or front.rows >= policy.max_preferred_rows:
        return BatchPlan(front.size)
    return BatchPlan(0, due_ns)


def _front_of(waiting: Iterable[Waiting], policy: BatchPolicy) -> _Front:
    size = rows = oldest_ns = preferred = 0
    key: object = None
    for each in waiting:
        if size == 0:
            key, oldest_ns = each.key, each.enqueued_ns
        else:
            grown = rows + each.rows
            if preferred == 0 and grown > policy.max_preferred_rows:
                preferred = size
            if grown > policy.max_rows or each.key != key:
                return _Front(size, rows, oldest_ns, True, preferred)
        size += 1
        rows += each.rows
        oldest_ns = min(oldest_ns, each.enqueued_ns)
        if rows in policy.preferred_rows:
            preferred = size
    return _Front(size, rows, oldest_ns, rows >= policy.max_rows, preferred)
