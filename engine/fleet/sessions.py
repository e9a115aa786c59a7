"""Which replica had the last request of each session, such as the turns of a conversation."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from time import perf_counter

MAX_SESSIONS = 65_536
"""Sessions that are remembered; beyond, those are forgotten that have sent nothing for the longest time."""


class SessionPlaces:
    """Remembers the replicas of sessions, by name. Belongs to the fleet's event loop."""

    def __init__(
        self, ttl_s: float, max_sessions: int = MAX_SESSIONS, clock: Callable[[], float] = perf_counter
    ) -> None:
        """A session is forgotten `ttl_s` after its last request."""
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """The replica of each session and when it got the last request, the oldest first."""

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session: str, names: Iterable[str]) -> str:
        """Return which of the replicas `names` is the session's: the one that had its last request; of a session that
        is not known, or whose replica is not among them, the one that each gateway with these replicas would name."""
        place, noted_at = self._places.get(session, ("", 0.0))
        known = list(names)
        if place in known and self._clock() - noted_at <= self._ttl_s:
            return place
        return max(known, key=lambda name: _rank(session, name), default="")

    def note(self, session: str, name: str) -> None:
        """Note that the replica `name` has got a request of the session."""
        now = self._clock()
        self._places[session] = name, now
        self._places.move_to_end(session)
        while self._places:
            _, noted_at = next(iter(self._places.values()))
            if len(self._places) <= self._max_sessions and now - noted_at <= self._ttl_s:
                break
            self._places.popitem(last=False)


def _rank(session: str, name: str) -> bytes:
    """Return how a replica ranks for a session: the same everywhere, and independent of the other replicas."""
    return blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
