"""What of sources and earlier turns fits into the tokens that are left. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """Indices of the passages that are kept, in order of rank, and how many of the latest exchanges are."""

    passages: tuple[int, ...]
    num_exchanges: int


def fit(passages: Sequence[int], exchanges: Sequence[int], room: int) -> Fit:
    """`passages` and `exchanges` are sizes, best first and oldest first; what is kept is at most `room` together.

    The latest exchanges may take half of the room, if the best passage fits beside them, and what passages leave.
    """
    recent = _latest(exchanges, _for_exchanges(passages, room))
    kept = _best(passages, room - sum(exchanges[len(exchanges) - recent :]))
    return Fit(kept, _latest(exchanges, room - sum(passages[index] for index in kept)))


def smaller(fit: Fit) -> Fit | None:
    """Without the worst passage, or without the oldest exchange where there is none; None for nothing left."""
    if fit.passages:
        return Fit(fit.passages[:-1], fit.num_exchanges)
    return Fit((), fit.num_exchanges - 1) if fit.num_exchanges else None


def _for_exchanges(passages: Sequence[int], room: int) -> int:
    if not passages:
        return room
    beside_best = room - passages[0]
    return min(room // 2, beside_best) if beside_best >= 0 else room // 2


def _best(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Each in its turn, where it fits whole: after one that is too long a shorter one may."""
    kept = []
    for index, size in enumerate(sizes):
        if size <= room:
            kept.append(index)
            room -= size
    return tuple(kept)


def _latest(sizes: Sequence[int], room: int) -> int:
    count = 0
    for size in reversed(sizes):
        if size > room:
            break
        room -= size
        count += 1
    return count
