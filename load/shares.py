"""The share of one of several client processes: which requests are its own, and how many it may have in flight."""

import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from sluice.load.config import RequestPace


@dataclass(frozen=True, slots=True)
class Share:
    """The requests of one process of `num_processes`.

    Requests are dealt to the places of `num_places`, and places to processes. For a closed loop they are the requests
    in flight, so that a process with more of them has more requests too. What request i is does not depend on who
    sends it: the seed alone decides.
    """

    number: int = 0
    num_processes: int = 1
    num_places: int = 1

    def owns(self, index: int) -> bool:
        return index % self.num_places % self.num_processes == self.number

    def indices(self) -> Iterator[int]:
        """Yield the numbers of its requests, without end."""
        return filter(self.owns, itertools.count())

    def part_of(self, amount: int) -> int:
        """Return its number of places out of `amount`."""
        return len(range(self.number, amount, self.num_processes))


WHOLE = Share()

Begin = Callable[[], Awaitable[float]]
"""Waits until all processes have warmed up. Returns the moment of the clock at which the run begins."""


def shares_of(pace: RequestPace, num_processes: int) -> list[Share]:
    """Return the share of each process."""
    num_places = pace.concurrency or num_processes
    return [Share(number, num_processes, num_places) for number in range(num_processes)]
