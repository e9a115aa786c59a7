"""Sequences that have no place yet."""

from serving.batching.sequences.sequence import Sequence
from serving.request import InferRequest

_NS_PER_US = 1000


class Backlog:
    """Those that began first come first. Taking out of the middle takes no longer than at the front."""

    def __init__(self) -> None:
        self._waiting: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None

    def take(self) -> Sequence:
        """The first one."""
        first = next(iter(self._waiting))
        del self._waiting[first]
        return first

    def discard(self, sequence: Sequence) -> None:
        """Harmless where it is not there."""
        self._waiting.pop(sequence, None)

    def clear(self) -> None:
        self._waiting.clear()

    def limit(self, sequence: Sequence, request: InferRequest, now_ns: int) -> None:
        """A request's `timeout` limits how long its sequence waits here, whatever holds for the other requests."""
        if request.timeout_us and sequence in self._waiting:
            deadline_ns = now_ns + request.timeout_us * _NS_PER_US
            sequence.deadline_ns = min(sequence.deadline_ns or deadline_ns, deadline_ns)

    def next_deadline_ns(self) -> int:
        """0 for none."""
        return min((each.deadline_ns for each in self._waiting if each.deadline_ns), default=0)

    def expired(self, now_ns: int) -> list[Sequence]:
        """Those whose time is up, taken out."""
        found = [each for each in self._waiting if 0 < each.deadline_ns <= now_ns]
        for each in found:
            del self._waiting[each]
        return found
