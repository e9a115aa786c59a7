"""How many requests of an ensemble may be in one of its steps at once (`max_inflight_requests`)."""

from collections import deque
from collections.abc import Callable


class StepLimit:
    """Lets `limit` in, and the others in order as places come free. 0 lets in everything."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_inside = 0
        self._waiting: deque[Callable[[], bool]] = deque()

    def enter(self, begin: Callable[[], bool]) -> None:
        """Call `begin`, now or later. It says whether it takes the place; who does calls `leave`, once."""
        self._waiting.append(begin)
        self._admit()

    def leave(self) -> None:
        """Give the place back; may begin another at once."""
        self._num_inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (not self._limit or self._num_inside < self._limit):
            begin = self._waiting.popleft()
            self._num_inside += 1
            if not begin():
                self._num_inside -= 1
