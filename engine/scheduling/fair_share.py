"""Who goes first within one priority class: tenants share the engine by what they were served.

Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Generic, TypeVar

from engine.forecast.wait import Backlog, Queued

UNNAMED_WEIGHT = 1.0
MAX_DEAD = 16
"""Entries of tenants who left that a heap may hold besides as many as live ones."""
MAX_COMPARED = 128
"""Tenants that an estimate looks at; more of them are taken to be alike."""


Q = TypeVar("Q", bound=Queued)


@dataclass(slots=True, eq=False)
class Entry(Generic[Q]):
    """A sequence, when it came, and whom it is charged to."""

    sequence: Q
    arrival: int
    tenant: "Tenant[Q]"
    size: Backlog
    is_paused: bool = False


@dataclass(slots=True, eq=False)
class Tenant(Generic[Q]):
    """One tenant's counter and what it has in the class."""

    name: str
    weight: float
    counter: float
    """Tokens served, divided by the weight. Only grows."""
    waiting: OrderedDict[int, Entry[Q]] = field(default_factory=OrderedDict)
    backlog: Backlog = field(default_factory=Backlog)
    num_started: int = 0
    """Sequences that run or are paused."""
    is_listed: bool = False
    """Whether the heap of those who wait has an entry for it."""
    is_idle_listed: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_started

    @property
    def key(self) -> tuple[float, int]:
        """Least goes first: who was served least, then whose oldest sequence came first."""
        return self.counter, next(iter(self.waiting.values())).arrival

    def charge(self, num_tokens: float) -> None:
        self.counter += num_tokens / self.weight


class FairShare(Generic[Q]):
    """The sequences of one priority class that wait, in the order of fair shares.

    Least counter first. A tenant that comes back is lifted to the least counter of those who wait (or the
    one that waited last), so that idling earns nothing. Counters only grow, so a key in a heap is never more than
    the true one: charging touches no heap, and a stale key is put right when it comes to the top.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, Tenant[Q]] = {}
        self._heap: list[tuple[float, int, Tenant[Q]]] = []
        self._idle: list[tuple[float, str]] = []
        self._num_active = 0
        self._last_active: Tenant[Q] | None = None
        self._num_started = 0

    @property
    def num_tenants(self) -> int:
        """Tenants it remembers."""
        return len(self._tenants)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, runs or is paused. Nothing is worth remembering then: all tenants start equal again."""
        return not self._num_active and not self._num_started

    def tenant(self, name: str) -> Tenant[Q]:
        """The tenant of that name, known from now on; a new one begins at the floor."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = Tenant(name, self._weights.get(name, UNNAMED_WEIGHT), self.floor())
            self._tenants[name] = tenant
        return tenant

    def counter(self, name: str) -> float:
        """Where the tenant stands, or would stand if it came now."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return self.floor()
        return tenant.counter if tenant.waiting else max(tenant.counter, self.floor())

    def floor(self) -> float:
        """The least counter of those who wait; with none, of the one that waited last."""
        self._settle()
        if self._heap:
            return self._heap[0][0]
        return self._last_active.counter if self._last_active is not None else 0.0

    # -- changes

    def add(self, entry: Entry[Q]) -> None:
        """The sequence waits behind its tenant's others."""
        tenant = entry.tenant
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self.floor())
            self._num_active += 1
        tenant.waiting[entry.sequence.stream_id] = entry
        tenant.backlog = tenant.backlog.plus(entry.size)
        if not tenant.is_listed:
            tenant.is_listed = True
            heappush(self._heap, (*tenant.key, tenant))
        self._forget_idle()

    def remove(self, entry: Entry[Q]) -> None:
        """The sequence waits no more."""
        tenant = entry.tenant
        del tenant.waiting[entry.sequence.stream_id]
        if tenant.waiting:
            tenant.backlog = tenant.backlog.plus(entry.size, -1.0)
            return
        tenant.backlog = Backlog()
        self._num_active -= 1
        self._last_active = tenant
        self._compact()
        self._list_if_idle(tenant)

    def start(self, tenant: Tenant[Q]) -> None:
        """One of the tenant's sequences runs, and may be paused and run again, until `stop`."""
        tenant.num_started += 1
        self._num_started += 1

    def stop(self, tenant: Tenant[Q]) -> None:
        """One of the tenant's sequences neither runs nor is paused any more."""
        tenant.num_started -= 1
        self._num_started -= 1
        self._list_if_idle(tenant)

    # -- order

    def in_order(self) -> Iterator[Q]:
        """Those who wait in the order of admission, each charged in passing, so that one walk tells the order in
        which they would be admitted one by one. Lazy: k sequences cost O(k log k), however many wait.

        A heap is walked from its top: a node's children come into question once the node has.
        """
        self._settle()
        front: list[tuple[float, int, int, _Turn[Q] | None]] = []
        self._see(0, front)
        while front:
            counter, _, node, turn = heappop(front)
            if turn is None:
                self._see(2 * node + 1, front)
                self._see(2 * node + 2, front)
                tenant = self._heap[node][2]
                if tenant.waiting:
                    turn = _Turn(tenant)
                    heappush(front, (tenant.counter, turn.entry.arrival, node, turn))
                continue
            yield turn.entry.sequence
            counter += turn.entry.size.num_tokens / turn.weight
            if turn.advance():
                heappush(front, (counter, turn.entry.arrival, node, turn))

    def _see(self, node: int, front: "list[tuple[float, int, int, _Turn[Q] | None]]") -> None:
        if node < len(self._heap):
            counter, arrival, _ = self._heap[node]
            heappush(front, (counter, arrival, node, None))

    def ahead_of(self, name: str) -> Backlog:
        """About what would be admitted before a sequence that the tenant adds now: all of its own that waits, and of
        each other tenant what is served until its counter has passed theirs."""
        own = self._tenants.get(name)
        ahead = own.backlog if own is not None else Backlog()
        weight = self._weights.get(name, UNNAMED_WEIGHT)
        turn = self.counter(name) + ahead.num_tokens / weight
        others = [tenant for _, _, tenant in islice(self._heap, MAX_COMPARED) if tenant.waiting and tenant is not own]
        scale = (self._num_active - (own is not None and bool(own.waiting))) / max(len(others), 1)
        for other in others:
            due = (turn - other.counter) * other.weight / other.backlog.num_tokens
            ahead = ahead.plus(other.backlog, scale * min(max(due, 0.0), 1.0))
        return ahead

    # -- keeping the heaps true and small

    def _settle(self) -> None:
        """Put the top of the heap right: drop tenants that left, move those that were charged."""
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
        if len(self._heap) <= 2 * self._num_active + MAX_DEAD:
            return
        for _, _, tenant in self._heap:
            tenant.is_listed = bool(tenant.waiting)
        self._heap = [(*tenant.key, tenant) for _, _, tenant in self._heap if tenant.waiting]
        heapify(self._heap)

    def _list_if_idle(self, tenant: Tenant[Q]) -> None:
        if tenant.is_idle and not tenant.is_idle_listed:
            tenant.is_idle_listed = True
            heappush(self._idle, (tenant.counter, tenant.name))

    def _forget_idle(self) -> None:
        """Idle tenants at or below the floor: they would be lifted to it on their return."""
        floor = self.floor()
        while self._idle and self._idle[0][0] <= floor:
            tenant = self._tenants[heappop(self._idle)[1]]
            tenant.is_idle_listed = False
            if tenant.is_idle and tenant.counter <= floor:
                del self._tenants[tenant.name]
            else:
                self._list_if_idle(tenant)


class _Turn(Generic[Q]):
    """A walk through what one tenant has waiting."""

    __slots__ = ("_rest", "entry", "weight")

    def __init__(self, tenant: Tenant[Q]) -> None:
        self._rest = iter(tenant.waiting.values())
        self.entry = next(self._rest)
        self.weight = tenant.weight

    def advance(self) -> bool:
        """Whether there is another; `entry` is it."""
        following = next(self._rest, None)
        if following is None:
            return False
        self.entry = following
        return True
