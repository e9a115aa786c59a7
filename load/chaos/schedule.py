"""The times of faults, decided by the seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault, when it comes, and the seed of what it chooses."""

    at_s: float
    """Seconds from the first fault's earliest moment."""
    name: str
    seed: int


def schedule(seed: int, names: Sequence[str], duration_s: float, mean_gap_s: float) -> Iterator[ScheduledFault]:
    """Yield the faults of a run. Each name comes once before any comes again, in an order of the seed. Pure."""
    rng = random.Random(seed)
    at_s, waiting = 0.0, list[str]()
    while True:
        at_s += rng.uniform(0.5, 1.5) * mean_gap_s
        if at_s >= duration_s:
            return
        if not waiting:
            waiting = rng.sample(names, len(names))
        yield ScheduledFault(at_s, waiting.pop(), rng.getrandbits(32))
