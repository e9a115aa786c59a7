"""How long an instance's runs take: short ones are done by the event loop itself, because handing a run to a thread and
back costs more than a small network.

It is learned on the instance's thread first, by the size of the inputs.
"""

from dataclasses import dataclass

SHORT_NS = 300_000
"""Longest run that the event loop does itself: about two hand-overs to a thread."""
HELD_NS = 5_000_000
"""Time by the clock from which a run on the loop counts as long whatever the reason. Below it, the usual reason is a
busy machine."""
_MIN_RUNS = 8
"""Runs on a thread before one is short enough for the loop."""
_DECAY = 0.9


@dataclass(slots=True)
class _Learned:
    """The run times of one batch size: the slowest recent one in CPU time, and the fastest by the clock.

    Threads wait for each other and for the interpreter's lock, so their runs look longer than they are.
    """

    num_runs: int = 0
    slowest_ns: float = 0.0
    quickest_ns: float = float("inf")

    def add(self, ns: int) -> None:
        self.slowest_ns = max(float(ns), _DECAY * self.slowest_ns + (1 - _DECAY) * ns)

    @property
    def is_short(self) -> bool:
        return self.num_runs >= _MIN_RUNS and self.slowest_ns < SHORT_NS and self.quickest_ns < 2 * SHORT_NS


class RunTimes:
    """Learns how long the runs of one instance take, by the number of elements in their inputs, in powers of two."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Learned] = {}

    def are_short(self, num_elements: int) -> bool:
        """Whether runs with so many elements are known to be short."""
        found = self._by_size.get(num_elements.bit_length())
        return found is not None and found.is_short

    def note_thread(self, num_elements: int, own_ns: int, clock_ns: int) -> None:
        """Note a run on a thread, which took so much of the thread's time, and so long by the clock."""
        found = self._by_size.setdefault(num_elements.bit_length(), _Learned())
        found.num_runs += 1
        found.quickest_ns = min(found.quickest_ns, clock_ns)
        found.add(own_ns)

    def note_loop(self, num_elements: int, own_ns: int, clock_ns: int) -> None:
        """Note a run on the event loop, which took so much of the loop's own time, and held it for so long."""
        self._by_size[num_elements.bit_length()].add(own_ns if clock_ns < HELD_NS else clock_ns)
