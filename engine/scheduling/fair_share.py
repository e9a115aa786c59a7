"""Order of admission within one priority: tenants share the engine by the tokens they were served. Virtual Token
Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024)."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, NamedTuple, TypeVar

from sluice.engine.sequence import QueuedSequence

DEFAULT_WEIGHT = 1.0
MAX_STALE_TENANTS = 16
"""Entries of tenants without waiting sequences that the heap may hold beyond as many as it has live ones."""


Q = TypeVar("Q", bound=QueuedSequence)


class QueuedWork(NamedTuple):
    """Sums over sequences that wait."""

    num_requests: int = 0
    num_tokens: int = 0
    num_blocks: int = 0

    @classmethod
    def of(cls, sequence: QueuedSequence) -> "QueuedWork":
        return cls(1, sequence.num_tokens, sequence.worst_case_blocks)

    def plus(self, other: "QueuedWork", sign: int = 1) -> "QueuedWork":
        """Return the sum of this and the other; a sign of -1 subtracts it."""
        return QueuedWork(
            self.num_requests + sign * other.num_requests,
            self.num_tokens + sign * other.num_tokens,
            self.num_blocks + sign * other.num_blocks,
        )


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[Q]):
    """A sequence with its order of arrival and the tenant that is charged."""

    sequence: Q
    arrival: int
    tenant: "TenantQueue[Q]"
    work: QueuedWork
    is_preempted: bool = False


@dataclass(slots=True, eq=False)
class TenantQueue(Generic[Q]):
    """One tenant's counter and its waiting sequences in a priority class."""

    name: str
    weight: float
    counter: float
    """Tokens served, divided by the weight. It only grows."""
    waiting: OrderedDict[int, QueueEntry[Q]] = field(default_factory=OrderedDict)
    num_started: int = 0
    """Sequences that run or are preempted."""
    is_listed: bool = False
    """Whether the heap of waiting tenants has an entry for it."""
    is_idle_listed: bool = False
    """Whether the heap of idle tenants has an entry for it."""

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_started

    @property
    def key(self) -> tuple[float, int]:
        """Sort key: the tenant that was served least goes first, then the one whose oldest sequence came first."""
        return self.counter, next(iter(self.waiting.values())).arrival

    def charge(self, num_tokens: float) -> None:
        self.counter += num_tokens / self.weight


class FairShare(Generic[Q]):
    """The waiting sequences of one priority class, in the order of fair shares.

    The tenant with the lowest counter goes first. A tenant that comes back is raised to the lowest counter of the
    waiting tenants (or of the one that waited last), so that idling earns nothing. Counters only grow, so a key in a
    heap is never above the true one: charging touches no heap, and a stale key is corrected when it reaches the top.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, TenantQueue[Q]] = {}
        self._heap: list[tuple[float, int, TenantQueue[Q]]] = []
        self._idle: list[tuple[float, str]] = []
        self._num_active = 0
        self._last_active: TenantQueue[Q] | None = None
        self._num_started = 0

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits, runs or is preempted. Counters may be dropped then: all tenants start equal."""
        return not self._num_active and not self._num_started

    def tenant(self, name: str, weight: float | None = None) -> TenantQueue[Q]:
        """Return the tenant of that name, which has the `weight` from here on, where one is given. A new one starts at
        the floor."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = TenantQueue(name, weight or self._weights.get(name, DEFAULT_WEIGHT), self.floor())
            self._tenants[name] = tenant
        elif weight is not None:
            tenant.weight = weight
        return tenant

    def weight(self, name: str) -> float:
        """Return the tenant's weight, or the one it would have if it came now without one."""
        tenant = self._tenants.get(name)
        return self._weights.get(name, DEFAULT_WEIGHT) if tenant is None else tenant.weight

    def counter(self, name: str) -> float:
        """Return the tenant's counter, or the one it would have if it came now."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return self.floor()
        return tenant.counter if tenant.waiting else max(tenant.counter, self.floor())

    def floor(self) -> float:
        """Return the lowest counter of the waiting tenants; without any, that of the tenant that waited last."""
        self._settle()
        if self._heap:
            return self._heap[0][0]
        return self._last_active.counter if self._last_active is not None else 0.0

    # -- changes

    def add(self, entry: QueueEntry[Q]) -> None:
        """Queue the sequence behind the others of its tenant."""
        tenant = entry.tenant
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self.floor())
            self._num_active += 1
        tenant.waiting[entry.sequence.stream_id] = entry
        if not tenant.is_listed:
            tenant.is_listed = True
            heappush(self._heap, (*tenant.key, tenant))
        self._forget_idle()

    def remove(self, entry: QueueEntry[Q]) -> None:
        """Take a waiting sequence out."""
        tenant = entry.tenant
        del tenant.waiting[entry.sequence.stream_id]
        if tenant.waiting:
            return
        self._num_active -= 1
        self._last_active = tenant
        self._compact()
        self._list_if_idle(tenant)

    def start(self, tenant: TenantQueue[Q]) -> None:
        """Count a sequence of the tenant that starts. It may be preempted and resumed until `stop`."""
        tenant.num_started += 1
        self._num_started += 1

    def stop(self, tenant: TenantQueue[Q]) -> None:
        """Count a sequence of the tenant that has ended."""
        tenant.num_started -= 1
        self._num_started -= 1
        self._list_if_idle(tenant)

    # -- order

    def in_order(self) -> Iterator[Q]:
        """Yield the waiting sequences in the order in which they would be admitted one by one. Each one's tenant is
        charged for it on the way, in this walk only. Lazy: k sequences cost O(k log k), however many wait. The heap is
        walked from its top: a node's children are considered once the node was."""
        self._settle()
        front: list[tuple[float, int, int, _TenantCursor[Q] | None]] = []
        self._push_node(0, front)
        while front:
            counter, _, node, cursor = heappop(front)
            if cursor is None:
                self._push_node(2 * node + 1, front)
                self._push_node(2 * node + 2, front)
                tenant = self._heap[node][2]
                if tenant.waiting:
                    cursor = _TenantCursor(tenant)
                    heappush(front, (tenant.counter, cursor.entry.arrival, node, cursor))
                continue
            yield cursor.entry.sequence
            counter += cursor.entry.work.num_tokens / cursor.weight
            if cursor.advance():
                heappush(front, (counter, cursor.entry.arrival, node, cursor))

    def _push_node(self, node: int, front: "list[tuple[float, int, int, _TenantCursor[Q] | None]]") -> None:
        if node < len(self._heap):
            counter, arrival, _ = self._heap[node]
            heappush(front, (counter, arrival, node, None))

    def num_waiting(self, name: str) -> int:
        """Return how many sequences of the tenant wait."""
        tenant = self._tenants.get(name)
        return len(tenant.waiting) if tenant is not None else 0

    # -- maintenance of the heaps

    def _settle(self) -> None:
        """Correct the top of the heap: drop tenants without waiting sequences, and move those that were charged."""
        heap = self._heap
        while heap:
            counter, arrival, tenant = heap[0]
            if not tenant.waiting:
                heappop(heap)
                tenant.is_listed = False
            elif (counter, arrival) != tenant.key:
                heapreplace(heap, (*tenant.key, tenant))
            else:
                return

    def _compact(self) -> None:
        if len(self._heap) <= 2 * self._num_active + MAX_STALE_TENANTS:
            return
        for _, _, tenant in self._heap:
            tenant.is_listed = bool(tenant.waiting)
        self._heap = [(*tenant.key, tenant) for _, _, tenant in self._heap if tenant.waiting]
        heapify(self._heap)

    def _list_if_idle(self, tenant: TenantQueue[Q]) -> None:
        if tenant.is_idle and not tenant.is_idle_listed:
            tenant.is_idle_listed = True
            heappush(self._idle, (tenant.counter, tenant.name))

    def _forget_idle(self) -> None:
        """Drop idle tenants at or below the floor, because they would be raised to it on their return."""
        floor = self.floor()
        while self._idle and self._idle[0][0] <= floor:
            tenant = self._tenants[heappop(self._idle)[1]]
            tenant.is_idle_listed = False
            if tenant.is_idle and tenant.counter <= floor:
                del self._tenants[tenant.name]
            else:
                self._list_if_idle(tenant)


class _TenantCursor(Generic[Q]):
    """Iterates over the waiting sequences of one tenant."""

    __slots__ = ("_rest", "entry", "weight")

    def __init__(self, tenant: TenantQueue[Q]) -> None:
        self._rest = iter(tenant.waiting.values())
        self.entry = next(self._rest)
        self.weight = tenant.weight

    def advance(self) -> bool:
        """Move `entry` to the next sequence. Returns False at the end."""
        following = next(self._rest, None)
        if following is None:
            return False
        self.entry = following
        return True
