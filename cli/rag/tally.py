"""What an ingestion has done so far."""

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts documents by what became of them. `num_planned` grows where a file turns out to hold many."""

    num_planned: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    num_chunks: int = 0
    num_deleted: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(document or file, why), in the order in which they failed."""
    has_unread: bool = False
    """Whether something could not be looked at, so that nobody knows which documents it holds."""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def num_done(self) -> int:
        return self.statuses.total() + len(self.failures)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def chunks_per_s(self) -> float:
        return self.num_chunks / max(self.elapsed_s, 1e-3)

    def count(self, status: str, num_chunks: int = 0) -> None:
        """Unchanged documents' chunks were made another time."""
        self.statuses[status] += 1
        self.num_chunks += num_chunks

    def fail(self, name: str, reason: str) -> None:
        self.failures.append((name, reason))

    def summary(self) -> str:
        """In one line."""
        counts = [f"{self.statuses[status]} {status}" for status in ("created", "updated", "unchanged")]
        if self.num_deleted:
            counts.append(f"{self.num_deleted} deleted")
        if self.failures:
            counts.append(f"{len(self.failures)} failed")
        speed = f"; {self.num_chunks} chunks in {self.elapsed_s:.1f} s" if self.num_chunks else ""
        return f"{', '.join(counts)}{speed}"
