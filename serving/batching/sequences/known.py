"""The sequences that take more requests, by id, and which of them nobody has asked for lately."""

from collections import OrderedDict
from collections.abc import Iterator
from time import perf_counter_ns

from serving.batching.sequences.sequence import Sequence
from serving.tensors.tensor import Tensor

_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


def key_of(correlation_id: int | str) -> int | str:
    """Ids are unsigned: a client's negative number is the one with the same bits."""
    return correlation_id if isinstance(correlation_id, str) else correlation_id & _ALL_BITS


class KnownSequences:
    """Lost ones are among them, so that their clients hear why."""

    def __init__(self, idle_ns: int) -> None:
        """A sequence is forgotten once nothing was asked of it, or ran in it, for `idle_ns`."""
        self._idle_ns = idle_ns
        self._by_id: OrderedDict[int | str, Sequence] = OrderedDict()
        """The one that was touched last at the end."""

    def __contains__(self, sequence: Sequence) -> bool:
        return self._by_id.get(key_of(sequence.correlation_id)) is sequence

    def get(self, correlation_id: int | str) -> Sequence | None:
        return self._by_id.get(key_of(correlation_id))

    def add(self, sequence: Sequence) -> None:
        self._by_id[key_of(sequence.correlation_id)] = sequence

    def forget(self, sequence: Sequence) -> None:
        """The next request with its id must begin another."""
        if sequence in self:
            del self._by_id[key_of(sequence.correlation_id)]

    def touch(self, sequence: Sequence) -> None:
        """Something was asked of it, or has run in it. Harmless where it is forgotten."""
        sequence.touched_ns = perf_counter_ns()
        if sequence in self:
            self._by_id.move_to_end(key_of(sequence.correlation_id))

    def id_tensors(self) -> Iterator[Tensor]:
        """Those of all that have one."""
        return (each.id_tensor for each in self._by_id.values() if each.id_tensor is not None)

    def next_idle_ns(self) -> int:
        """When the next one is idle for too long, unless it is touched; 0 for none."""
        if not self._by_id:
            return 0
        return next(iter(self._by_id.values())).touched_ns + self._idle_ns

    def idle(self, now_ns: int) -> list[Sequence]:
        """Those idle for too long. One whose request waits or runs is not idle."""
        found: list[Sequence] = []
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
