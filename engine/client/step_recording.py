"""The recorded steps of an engine, by this process's clock."""

from math import inf
from time import perf_counter

import msgspec

from sluice.engine.frames import ProfiledStep, StepProfile


class StepRecording:
    """Collects profiles. The two clocks' difference is the least that any frame shows, which travelled fastest."""

    def __init__(self) -> None:
        self._steps: list[ProfiledStep] = []
        self._offset = inf

    def take(self, profile: StepProfile) -> None:
        """Add the steps of a frame that has just come."""
        self._offset = min(self._offset, perf_counter() - profile.now)
        self._steps += profile.steps

    def steps(self) -> list[ProfiledStep]:
        """Return the steps with times of perf_counter."""
        return [msgspec.structs.replace(each, started=each.started + self._offset) for each in self._steps]
