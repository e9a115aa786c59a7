"""Decides what to use: the best points of a search are compared with the default settings, until one meets the
constraints there too."""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.tuning.comparison import (
    MeasureSeeded,
    TuningVerdict,
    best_trials,
    defaults_among,
    judge,
    nothing_meets,
    run_rounds,
)
from sluice.tuning.figures import Goal
from sluice.tuning.plan import Steps
from sluice.tuning.space import Point, SearchSpace, describe
from sluice.tuning.trials import Stage, Trial, TrialStore

_MOST_CANDIDATES = 3
"""Points that are compared with the default settings at most, one after the other."""


@dataclass(frozen=True, slots=True)
class TuningDecision:
    """Decides by `num_rounds` rounds on servers, which `measure` makes."""

    goal: Goal
    num_rounds: int
    space: SearchSpace
    store: TrialStore
    measure: MeasureSeeded
    steps: Steps

    async def decide(self, trials: Sequence[Trial]) -> tuple[Sequence[tuple[Trial, Trial]], TuningVerdict]:
        """Compare the best point with the default settings. One that met a constraint by luck gives way to the next."""
        rounds: Sequence[tuple[Trial, Trial]] = ()
        verdict: TuningVerdict | None = None
        for number, found in enumerate(self._candidates(trials)):
            default = self._default_beside(found, trials)
            if self.space.settings_of(found) == self.space.settings_of(default):
                reason = "nothing that was tried is better than the default settings"
                return rounds, verdict or TuningVerdict(found, default, False, reason)
            if verdict is not None:
                self.steps.say(f"{describe(verdict.found)}: {verdict.reason}; the next best is {describe(found)}")
            rounds = await self._compare((default, found), number * self.num_rounds)
            verdict = judge((default, found), rounds, self.goal)
            if not verdict.was_luck:
                break
        assert verdict is not None
        return rounds, verdict

    def _candidates(self, trials: Sequence[Trial]) -> list[Point]:
        """Return the points that meet the constraints, the best first, as many as are worth rounds. Raises TuneError
        where there is none."""
        goal = self.goal
        best = best_trials(trials, goal, self.space, len(trials))
        if not best:
            raise nothing_meets(trials, goal, "on a server")
        best.sort(key=lambda trial: goal.objective.sort_key(trial.figures or {}))
        return [trial.point for trial in best[:_MOST_CANDIDATES]]

    def _default_beside(self, found: Point, trials: Sequence[Trial]) -> Point:
        """Return the default settings at the best load at which they meet the constraints, else at that of `found`."""
        goal = self.goal
        defaults = [
            trial
            for trial in defaults_among(trials, self.space)
            if trial.figures is not None and goal.is_met(trial.figures)
        ]
        if not defaults:
            return self.space.default_point(found[self.space.load.name])
        return min(defaults, key=lambda trial: goal.objective.sort_key(trial.figures or {})).point

    async def _compare(self, points: tuple[Point, Point], num_before: int) -> list[tuple[Trial, Trial]]:
        num_done = max(0, len(list(self.store.of(Stage.ROUND))) - 2 * num_before)
        planned = 2 * self.num_rounds
        noun = "runs in turns with the default settings"
        async with self.steps.counting(noun, min(num_done, planned), planned) as report:
            return await run_rounds(points, self.num_rounds, self.store, self.measure, report, num_before)
