"""The schedule of a training run: phases of growing row length, and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase with rows of `length` tokens, until the share `until` of the run.

    A step has `micro_batches` x `rows` x `length` tokens.
    """

    name: str
    length: int
    until: float
    rows: int
    micro_batches: int

    @property
    def rows_per_step(self) -> int:
        return self.rows * self.micro_batches


# Copying is learned fastest on short rows. The last phase trains every position.
PHASES = (
    Phase("short", 256, 0.22, rows=8, micro_batches=4),
    Phase("middle", 512, 0.88, rows=4, micro_batches=4),
    Phase("long", 1024, 1.0, rows=2, micro_batches=4),
)
# After the phases, by `finetune`.
FINE_TUNING = Phase("tools", 512, 1.0, rows=4, micro_batches=2)
WARM_UP_STEPS = 30


def phase_at(progress: float) -> int:
    return next((i for i, phase in enumerate(PHASES) if progress < phase.until), len(PHASES) - 1)


def rate_scale(step: int, progress: float) -> float:
    """Return the learning rate's factor: a warm-up, constant until 0.4, then linear to a hundredth."""
    warm_up = min(1.0, step / WARM_UP_STEPS)
    decay = 1.0 if progress < 0.4 else max(0.01, (1 - progress) / 0.6)
    return warm_up * decay
