"""One sequence under way."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

from serving.batching.sequences.slots import Incarnation, SlotBatcher
from serving.job import InferJob
from serving.request import InferRequest
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError


class SequenceSlot(NamedTuple):
    """One of the sequences that an instance has at a time."""

    lane: SlotBatcher
    slot: int


@dataclass(slots=True, eq=False)
class RequestSequence:
    """`current` is queued or running, `line` are its requests behind that one. Times are perf_counter_ns."""

    correlation_id: int | str
    id_tensor: Tensor | None
    place: SequenceSlot | None = None
    """None while it waits for one, and once it is lost."""
    line: deque[InferJob] = field(default_factory=deque)
    current: InferJob | None = None
    touched_ns: int = 0
    deadline_ns: int = 0
    """When its wait for a place is over; 0 is never."""
    is_ended: bool = False
    """Whether the last of its requests so far ends it: the next one has to begin it anew."""
    is_broken: bool = False
    """Whether one of its requests was cancelled before it ran: the model's state is not what it should be."""
    loss: str = ""
    """Why it cannot go on, in words for its client; "" while it can."""
    life: Incarnation | None = None
    """Which of the instance's processes has its state; None: none of them yet."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """What its next request gets as inputs, by name."""
    fresh_states: dict[str, Tensor] = field(default_factory=dict)
    """What the present request has given so far: it counts once the request has succeeded."""

    @property
    def is_busy(self) -> bool:
        return self.current is not None or bool(self.line)

    @property
    def has_lost_state(self) -> bool:
        """Whether the process that had its state is gone."""
        if self.place is None or self.life is None:
            return False
        lane = self.place.lane
        return not lane.is_ready or lane.life != self.life

    def notice_life(self) -> bool:
        """One of its requests has ended. False where that took the process, and the state, with it."""
        if self.place is None:
            return True
        lane = self.place.lane
        if not lane.is_ready:
            lane.note_death()
            return False
        if self.life is None:
            self.life = lane.life
        return self.life == lane.life

    def commit_states(self) -> None:
        """What the present request has given is what the next one gets."""
        if self.fresh_states:
            self.states = self.states | self.fresh_states
            self.fresh_states = {}


_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


def correlation_key(correlation_id: int | str) -> int | str:
    """Ids are unsigned: a client's negative number is the one with the same bits."""
    return correlation_id if isinstance(correlation_id, str) else correlation_id & _ALL_BITS


class LiveSequences:
    """Lost ones are among them, so that their clients hear why."""

    def __init__(self, idle_ns: int) -> None:
        """A sequence is forgotten once nothing was asked of it, or ran in it, for `idle_ns`."""
        self._idle_ns = idle_ns
        self._by_id: OrderedDict[int | str, RequestSequence] = OrderedDict()
        """The one that was touched last at the end."""

    def __contains__(self, sequence: RequestSequence) -> bool:
        return self._by_id.get(correlation_key(sequence.correlation_id)) is sequence

    def get(self, correlation_id: int | str) -> RequestSequence | None:
        return self._by_id.get(correlation_key(correlation_id))

    def add(self, sequence: RequestSequence) -> None:
        self._by_id[correlation_key(sequence.correlation_id)] = sequence

    def forget(self, sequence: RequestSequence) -> None:
        """The next request with its id must begin another."""
        if sequence in self:
            del self._by_id[correlation_key(sequence.correlation_id)]

    def touch(self, sequence: RequestSequence) -> None:
        """Something was asked of it, or has run in it. Harmless where it is forgotten."""
        sequence.touched_ns = perf_counter_ns()
        if sequence in self:
            self._by_id.move_to_end(correlation_key(sequence.correlation_id))

    def id_tensors(self) -> Iterator[Tensor]:
        """Those of all that have one."""
        return (each.id_tensor for each in self._by_id.values() if each.id_tensor is not None)

    def next_idle_ns(self) -> int:
        """When the next one is idle for too long, unless it is touched; 0 for none."""
        if not self._by_id:
            return 0
        return next(iter(self._by_id.values())).touched_ns + self._idle_ns

    def idle(self, now_ns: int) -> list[RequestSequence]:
        """Those idle for too long. One whose request waits or runs is not idle."""
        found: list[RequestSequence] = []
        for each in list(self._by_id.values()):
            if each.touched_ns + self._idle_ns > now_ns:
                break
            if each.is_busy:
                self.touch(each)
            else:
                found.append(each)
        return found

    def clear(self) -> None:
        self._by_id.clear()


_NS_PER_US = 1000


class SequenceBacklog:
    """Those that began first come first. Taking out of the middle takes no longer than at the front."""

    def __init__(self) -> None:
        self._waiting: dict[RequestSequence, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: RequestSequence) -> None:
        self._waiting[sequence] = None

    def take(self) -> RequestSequence:
        """The first one."""
        first = next(iter(self._waiting))
        del self._waiting[first]
        return first

    def discard(self, sequence: RequestSequence) -> None:
        """Harmless where it is not there."""
        self._waiting.pop(sequence, None)

    def clear(self) -> None:
        self._waiting.clear()

    def limit(self, sequence: RequestSequence, request: InferRequest, now_ns: int) -> None:
        """A request's `timeout` limits how long its sequence waits here, whatever holds for the other requests."""
        if request.timeout_us and sequence in self._waiting:
            deadline_ns = now_ns + request.timeout_us * _NS_PER_US
            sequence.deadline_ns = min(sequence.deadline_ns or deadline_ns, deadline_ns)

    def next_deadline_ns(self) -> int:
        """0 for none."""
        return min((each.deadline_ns for each in self._waiting if each.deadline_ns), default=0)

    def expired(self, now_ns: int) -> list[RequestSequence]:
        """Those whose time is up, taken out."""
        found = [each for each in self._waiting if 0 < each.deadline_ns <= now_ns]
        for each in found:
            del self._waiting[each]
        return found


class SlotAssigner:
    """Gives each sequence one, first come first served."""

    def __init__(self, lanes: Items[SlotBatcher], on_placed: Callable[[RequestSequence], None]) -> None:
        self.backlog = SequenceBacklog()
        self._lanes = lanes
        self._on_placed = on_placed

    def ask(self, sequence: RequestSequence) -> None:
        """For a sequence that has none; it waits where there is none free."""
        self.backlog.add(sequence)
        self._fill()

    def change(self, sequence: RequestSequence) -> None:
        """Take its place, and let it wait for another behind those that wait already."""
        self.backlog.add(sequence)
        self.vacate(sequence)

    def vacate(self, sequence: RequestSequence) -> None:
        """Give its place, if it has one, to the one that waits for longest."""
        if sequence.place is None:
            return
        lane, slot = sequence.place
        sequence.place = None
        lane.slots.give_back(slot)
        self._fill()

    def _fill(self) -> None:
        while len(self.backlog):
            free = [(lane, slot) for lane in self._lanes if (slot := lane.slots.lowest) is not None]
            if not free:
                return
            lane, _ = min(free, key=lambda each: (not each[0].is_ready, each[0].is_spillover, each[1]))
            sequence = self.backlog.take()
            sequence.deadline_ns = 0
            sequence.place = SequenceSlot(lane, lane.slots.take())
            self._on_placed(sequence)


def missing_id_error(model: str) -> SluiceError:
    return _invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")


def batch_size_error(model: str) -> SluiceError:
    return _invalid(
        f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
    )


def not_started_error(model: str, correlation_id: int | str) -> SluiceError:
    return _invalid(
        f"inference request for sequence {correlation_key(correlation_id)} to model '{model}' must specify the START flag on "
        "the first request of the sequence"
    )


def describe_lost_sequence(model: str, correlation_id: int | str, instance: str) -> str:
    """What has become of it."""
    return (
        f"the state of sequence {correlation_key(correlation_id)} of model '{model}' was lost with a process of {instance}: "
        "begin the sequence again, with the START flag"
    )


def describe_lost_request(instance: str) -> str:
    """What has become of one that is run several times."""
    return f"the state of the request was lost with a process of {instance}: send it again"


def state_lost_error(words: str) -> SluiceError:
    """For its next requests, and for those that were waiting already."""
    return SluiceError(ErrorCode.UNAVAILABLE, words)


def slot_timeout_error() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "timeout of the corresponding sequence has been expired")


def cancelled_error() -> SluiceError:
    return SluiceError(ErrorCode.CANCELLED, "the request was cancelled")


def sibling_cancelled_error() -> SluiceError:
    return SluiceError(ErrorCode.CANCELLED, "a request of the same sequence was cancelled")


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
