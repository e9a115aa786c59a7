"""The places on the instances, and who waits for one."""

from collections.abc import Callable
from collections.abc import Sequence as Items

from serving.batching.sequences.backlog import Backlog
from serving.batching.sequences.lanes import Lane
from serving.batching.sequences.sequence import Place, Sequence


class Places:
    """Gives each sequence one, first come first served."""

    def __init__(self, lanes: Items[Lane], on_placed: Callable[[Sequence], None]) -> None:
        self.backlog = Backlog()
        self._lanes = lanes
        self._on_placed = on_placed

    def ask(self, sequence: Sequence) -> None:
        """For a sequence that has none; it waits where there is none free."""
        self.backlog.add(sequence)
        self._fill()

    def change(self, sequence: Sequence) -> None:
        """Take its place, and let it wait for another behind those that wait already."""
        self.backlog.add(sequence)
        self.vacate(sequence)

    def vacate(self, sequence: Sequence) -> None:
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
            sequence.place = Place(lane, lane.slots.take())
            self._on_placed(sequence)
