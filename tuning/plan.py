"""A tuning that is to be made: the subject, the goal, and how far to go."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.tuning.driving import Drive
from sluice.tuning.figures import Goal
from sluice.tuning.subject import Subject


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
