"""A tuning that is to be made: the subject, the goal, how far to go, and whoever is shown the progress."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sluice.tuning.driving import Drive
from sluice.tuning.figures import Goal
from sluice.tuning.subject import Subject
from sluice.tuning.trials import Trial


class Steps(Protocol):
    """Shows how far a tuning has come."""

    def say(self, line: str) -> None:
        """Show a line that stays."""
        ...

    def note(self, line: str) -> None:
        """Show what is being done, until something else is."""
        ...

    def counting(
        self, noun: str, num_done: int, num_planned: int
    ) -> AbstractAsyncContextManager[Callable[[Trial], None]]:
        """Show a count of trials. Yields what to tell of each."""
        ...


@dataclass(frozen=True, slots=True)
class TunePlan:
    """A plan: the subject, the goal, and how far to go. `num_checked` simulated points are measured on servers,
    `num_rounds` times the best and the default settings in turns."""

    subject: Subject
    drive: Drive
    goal: Goal
    folder: Path
    is_live: bool
    costs: Path | None
    num_trials: int
    num_checked: int
    num_rounds: int
    seed: int
    setup: dict[str, Any]
