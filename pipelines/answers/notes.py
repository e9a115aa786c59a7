"""Notes for the headers of an answer: the route and the cache that it came through."""

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class AnswerNotes:
    """Notes about one answer, which may be of several generations. Belongs to the event loop."""

    targets: list[str] = field(default_factory=list)
    """The targets of a route that answer, in the order in which they began."""
    num_attempts: int = 0
    """The most attempts that a generation of it took; 0 without a route."""
    num_hits: int = 0
    num_misses: int = 0
    """Generations of which a cache had the answer, and those of which it did not have it and may keep it."""

    def note_target(self, target: str, num_attempts: int) -> None:
        """Note that a target answers, after so many attempts with it."""
        if target not in self.targets:
            self.targets.append(target)
        self.num_attempts = max(self.num_attempts, num_attempts)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that an answer which starts now has."""
        headers = []
        if self.targets:
            headers.append((b"x-sluice-target", ",".join(self.targets).encode("ascii", "backslashreplace")))
            headers.append((b"x-sluice-attempts", b"%d" % self.num_attempts))
        if self.num_hits or self.num_misses:
            headers.append((b"x-sluice-cache", b"miss" if self.num_misses else b"hit"))
        return headers


current_notes: ContextVar[AnswerNotes | None] = ContextVar("current_notes", default=None)
"""The notes of the request that this task works for; None where nobody reads them."""


def note_lookup(*, is_hit: bool, is_only: bool = False) -> None:
    """Note whether a cache had an answer of the current request, or its `is_only` one."""
    notes = current_notes.get()
    if notes is not None:
        notes.num_hits = is_hit + (0 if is_only else notes.num_hits)
        notes.num_misses = (not is_hit) + (0 if is_only else notes.num_misses)
