"""Sequences in flight: their state, which are known by id, which wait for a slot, and the errors of their requests."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

from sluice.serving.batching.sequences.slots import Incarnation, SlotBatcher
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor

_NS_PER_US = 1000
_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


class SequenceSlot(NamedTuple):
    """A slot for one sequence on an instance."""

    batcher: SlotBatcher
    number: int


@dataclass(slots=True, eq=False)
class RequestSequence:
    """Requests that belong together: they run one after the other, in order, on the instance that holds their state.

    `current` is queued or running; `queue` holds the requests behind it. Times are perf_counter_ns.
    """

    correlation_id: int | str
    id_tensor: Tensor | None
    slot: SequenceSlot | None = None
    """None while it waits for a slot, and once its state is lost."""
    queue: deque[InferJob] = field(default_factory=deque)
    current: InferJob | None = None
    used_ns: int = 0
    """Time of its last request's arrival or end."""
    deadline_ns: int = 0
    """End of its wait for a slot; 0 is never."""
    is_ended: bool = False
    """Whether the last request so far has the END flag: the next one must start the sequence again."""
    is_broken: bool = False
    """Whether one of its requests was cancelled before it ran, so that the model's state lacks it."""
    lost_reason: str = ""
    """Message for its client once its state is lost; "" before."""
    incarnation: Incarnation | None = None
    """The process of the instance that has its state; None until one has."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of its next request, by name."""
    new_states: dict[str, Tensor] = field(default_factory=dict)
    """States that the present request has given so far. They count once it has succeeded."""

    @property
    def is_busy(self) -> bool:
        return self.current is not None or bool(self.queue)

    @property
    def has_lost_state(self) -> bool:
        """Whether the process that had its state is gone."""
        if self.slot is None or self.incarnation is None:
            return False
        batcher = self.slot.batcher
        return not batcher.is_ready or batcher.incarnation != self.incarnation

    def check_incarnation(self) -> bool:
        """Check after a request whether its process is still there. False where the state was lost with it."""
        if self.slot is None:
            return True
        batcher = self.slot.batcher
        if not batcher.is_ready:
            batcher.record_crash()
            return False
        if self.incarnation is None:
            self.incarnation = batcher.incarnation
        return self.incarnation == batcher.incarnation

    def commit_states(self) -> None:
        """Give the next request the states of the present one."""
        if self.new_states:
            self.states = self.states | self.new_states
            self.new_states = {}


class LiveSequences:
    """Sequences that take more requests, by id. Lost ones stay until they are idle, so that their clients learn why."""

    def __init__(self, idle_ns: int) -> None:
        """A sequence is idle once it was not used for `idle_ns`."""
        self._idle_ns = idle_ns
        self._by_id: OrderedDict[int | str, RequestSequence] = OrderedDict()
        """Sequences in the order of their last use."""

    def __contains__(self, sequence: RequestSequence) -> bool:
        return self._by_id.get(correlation_key(sequence.correlation_id)) is sequence

    def get(self, correlation_id: int | str) -> RequestSequence | None:
        return self._by_id.get(correlation_key(correlation_id))

    def add(self, sequence: RequestSequence) -> None:
        self._by_id[correlation_key(sequence.correlation_id)] = sequence

    def discard(self, sequence: RequestSequence) -> None:
        """Remove a sequence: the next request with its id must start another. Harmless where it is not there."""
        if sequence in self:
            del self._by_id[correlation_key(sequence.correlation_id)]

    def touch(self, sequence: RequestSequence) -> None:
        """Note a use of the sequence. Harmless where it was removed."""
        sequence.used_ns = perf_counter_ns()
        if sequence in self:
            self._by_id.move_to_end(correlation_key(sequence.correlation_id))

    def id_tensors(self) -> Iterator[Tensor]:
        """Yield the id tensors of the sequences that have one."""
        return (each.id_tensor for each in self._by_id.values() if each.id_tensor is not None)

    def next_idle_ns(self) -> int:
        """Return the time at which the next sequence is idle unless it is used; 0 for none."""
        if not self._by_id:
            return 0
        return next(iter(self._by_id.values())).used_ns + self._idle_ns

    def find_idle(self, now_ns: int) -> list[RequestSequence]:
        """Return the idle sequences. One whose request waits or runs is not idle."""
        found: list[RequestSequence] = []
        for each in list(self._by_id.values()):
            if each.used_ns + self._idle_ns > now_ns:
                break
            if each.is_busy:
                self.touch(each)
            else:
                found.append(each)
        return found

    def clear(self) -> None:
        self._by_id.clear()


class SequenceBacklog:
    """Sequences that wait for a slot, oldest first. Removal from the middle is as fast as from the front."""

    def __init__(self) -> None:
        self._waiting: dict[RequestSequence, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: RequestSequence) -> None:
        self._waiting[sequence] = None

    def take(self) -> RequestSequence:
        """Remove and return the oldest one."""
        first = next(iter(self._waiting))
        del self._waiting[first]
        return first

    def discard(self, sequence: RequestSequence) -> None:
        """Remove a sequence. Harmless where it is not there."""
        self._waiting.pop(sequence, None)

    def clear(self) -> None:
        self._waiting.clear()

    def limit(self, sequence: RequestSequence, request: InferRequest, now_ns: int) -> None:
        """Limit the sequence's wait to the request's timeout, whatever the timeouts of its other requests."""
        if request.timeout_us and sequence in self._waiting:
            deadline_ns = now_ns + request.timeout_us * _NS_PER_US
            sequence.deadline_ns = min(sequence.deadline_ns or deadline_ns, deadline_ns)

    def next_deadline_ns(self) -> int:
        """Return the earliest deadline; 0 for none."""
        return min((each.deadline_ns for each in self._waiting if each.deadline_ns), default=0)

    def take_expired(self, now_ns: int) -> list[RequestSequence]:
        """Remove and return the sequences whose deadline has passed."""
        found = [each for each in self._waiting if 0 < each.deadline_ns <= now_ns]
        for each in found:
            del self._waiting[each]
        return found


class SlotAssigner:
    """Gives each sequence a slot, first come first served."""

    def __init__(
        self,
        batchers: Sequence[SlotBatcher],
        on_assigned: Callable[[RequestSequence], None],
        on_released: Callable[[], None],
    ) -> None:
        """`batchers` may change: `fill` gives the slots of new ones to sequences that wait."""
        self.backlog = SequenceBacklog()
        self._batchers = batchers
        self._on_assigned = on_assigned
        self._on_released = on_released

    def assign(self, sequence: RequestSequence) -> None:
        """Give a slot to a sequence that has none; it waits where none is free."""
        self.backlog.add(sequence)
        self.fill()

    def reassign(self, sequence: RequestSequence) -> None:
        """Release the sequence's slot, and let it wait for another behind the sequences that wait already."""
        self.backlog.add(sequence)
        self.release(sequence)

    def release(self, sequence: RequestSequence) -> None:
        """Give the sequence's slot, if it has one, to the sequence that waits longest."""
        if sequence.slot is None:
            return
        batcher, number = sequence.slot
        sequence.slot = None
        batcher.slots.release(number)
        self._on_released()
        self.fill()

    def fill(self) -> None:
        """Give free slots to the sequences that wait."""
        while len(self.backlog):
            free = [(each, number) for each in self._batchers if (number := each.slots.lowest) is not None]
            if not free:
                return
            batcher, _ = min(free, key=lambda each: (not each[0].is_ready, each[0].is_spillover, each[1]))
            sequence = self.backlog.take()
            sequence.deadline_ns = 0
            sequence.slot = SequenceSlot(batcher, batcher.slots.take())
            self._on_assigned(sequence)


def correlation_key(correlation_id: int | str) -> int | str:
    """Return the key of a correlation id. Numbers are unsigned: a negative one is the one with the same bits."""
    return correlation_id if isinstance(correlation_id, str) else correlation_id & _ALL_BITS
