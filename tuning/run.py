"""One whole tuning: learn, search, check on servers, compare with the default settings in turns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tuning.comparison import TuningVerdict, best_trials, defaults_among, judge, nearest_trial, run_rounds
from tuning.driving import Drive, LiveMeasurer
from tuning.errors import TrialFailedError, TuneError
from tuning.figures import Goal
from tuning.language_model import LanguageModelSubject
from tuning.search import Measure, SearchSettings, measured, search
from tuning.server import running_server
from tuning.simulating import Simulator
from tuning.space import Point, SearchSpace, describe
from tuning.subject import Subject
from tuning.trials import Stage, Trial, TrialStore

_LARGE_SPACE = 10_000


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


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuning that has ended."""

    plan: TunePlan
    space: SearchSpace
    store: TrialStore
    rounds: Sequence[tuple[Trial, Trial]]
    verdict: TuningVerdict

    @property
    def searched(self) -> list[Trial]:
        """The trials of the search."""
        return list(self.store.of(Stage.LIVE if self.plan.is_live else Stage.SIMULATED))


async def tune(plan: TunePlan, steps: Steps) -> Tuning:
    """Run a tuning, or go on with it. Raises TuneError where it cannot begin, or no point meets the constraints."""
    store = TrialStore.open(plan.folder, plan.setup)
    if store.trials:
        steps.say(f"going on after {len(store.trials)} trials in {plan.folder}")
    async with AsyncExitStack() as stack:
        run = _Run(plan, store, steps)
        stack.push_async_callback(run.live.close)
        return await run.tune()


@dataclass(slots=True)
class _Run:
    plan: TunePlan
    store: TrialStore
    steps: Steps
    live: LiveMeasurer = field(init=False)

    def __post_init__(self) -> None:
        self.live = LiveMeasurer(self.plan.subject, self.plan.drive, self.plan.folder)

    async def tune(self) -> Tuning:
        plan = self.plan
        simulator = self._simulator()
        await self._learn(simulator)
        space = plan.subject.space
        if not space.settings and len(space.load.values) < 2:
            raise TuneError("there is nothing to search: name settings with --search, or several loads")
        self._say_space(space)
        trials = await self._search(space, simulator.measure if simulator else self.live.measure)
        if simulator:
            trials = await self._check(space, trials)
        found, default = self._choose(space, trials)
        if space.settings_of(found) == space.settings_of(default):
            reason = "nothing that was tried is better than the default settings"
            return Tuning(plan, space, self.store, (), TuningVerdict(found, default, False, reason))
        points = (default, found)
        rounds = await self._compare(points)
        return Tuning(plan, space, self.store, rounds, judge(points, rounds, plan.goal))

    def _simulator(self) -> Simulator | None:
        plan = self.plan
        if plan.is_live:
            return None
        assert isinstance(plan.subject, LanguageModelSubject), "only language models are simulated"
        return Simulator(plan.subject, plan.drive, plan.folder, self.steps.note, plan.costs)

    async def _learn(self, simulator: Simulator | None) -> None:
        """Start a server with the default settings: it tells what can be searched, and what steps cost."""
        subject = self.plan.subject
        self.steps.note("starting a server with the default settings")
        try:
            async with running_server(subject.default_arguments(), self.plan.folder / "logs" / "default.log") as server:
                await subject.learn(server)
                if simulator is not None:
                    await simulator.prepare(server)
        except TrialFailedError as error:
            raise TuneError(f"with the default settings {error}") from None

    def _say_space(self, space: SearchSpace) -> None:
        for dimension in space.dimensions:
            values = ", ".join(map(str, dimension.values))
            default = "" if dimension is space.load else f" (default {dimension.default})"
            self.steps.say(f"{dimension.name}: {values}{default}")
        if space.size > _LARGE_SPACE:
            self.steps.say(f"{space.size:,} points: fewer values or more --trials find more")

    async def _search(self, space: SearchSpace, measure: Measure) -> list[Trial]:
        plan = self.plan
        stage = Stage.LIVE if plan.is_live else Stage.SIMULATED
        settings = SearchSettings(stage, min(plan.num_trials, space.size), plan.seed)
        num_done = len(list(self.store.of(stage)))
        noun = "trials on servers" if plan.is_live else "trials in the simulator"
        async with self.steps.counting(noun, num_done, settings.num_trials) as report:
            return await search(space, plan.goal, settings, self.store, measure, report)

    async def _check(self, space: SearchSpace, trials: Sequence[Trial]) -> list[Trial]:
        """Measure on servers the best simulated points, and the default settings at their best simulated loads."""
        plan = self.plan
        best = best_trials(trials, plan.goal, space, plan.num_checked)
        if not best:
            raise _nothing_meets(trials, plan.goal, "in the simulator")
        defaults = defaults_among(trials, space)
        best_defaults = best_trials(defaults, plan.goal, space, max(plan.num_checked // 2, 1))
        at_same_load = space.default_point(best[0].point[space.load.name])
        points = [trial.point for trial in (*best, *best_defaults)] or [at_same_load]
        points += [] if best_defaults else [at_same_load]
        unique = list({describe(point): point for point in points}.values())
        # Neighbours have the same settings, so that one server measures them.
        unique.sort(key=lambda point: describe(space.settings_of(point)))
        num_done = sum(self.store.find(Stage.LIVE, point) is not None for point in unique)
        async with self.steps.counting("points checked on servers", num_done, len(unique)) as report:
            for point in unique:
                if self.store.find(Stage.LIVE, point) is None:
                    report(await measured(self.store, Stage.LIVE, point, self.live.measure))
        return [trial for point in unique if (trial := self.store.find(Stage.LIVE, point)) is not None]

    def _choose(self, space: SearchSpace, trials: Sequence[Trial]) -> tuple[Point, Point]:
        """Return the best point, and the default settings at their best load, or at that of the best point."""
        goal = self.plan.goal
        best = best_trials(trials, goal, space, len(trials))
        if not best:
            raise _nothing_meets(trials, goal, "on a server")
        found = min(best, key=lambda trial: goal.objective.sort_key(trial.figures or {})).point
        defaults = [
            trial for trial in defaults_among(trials, space) if trial.figures is not None and goal.is_met(trial.figures)
        ]
        if not defaults:
            return found, space.default_point(found[space.load.name])
        return found, min(defaults, key=lambda trial: goal.objective.sort_key(trial.figures or {})).point

    async def _compare(self, points: tuple[Point, Point]) -> list[tuple[Trial, Trial]]:
        num_done = len(list(self.store.of(Stage.ROUND)))
        planned = 2 * self.plan.num_rounds
        noun = "runs in turns with the default settings"
        async with self.steps.counting(noun, min(num_done, planned), planned) as report:
            return await run_rounds(points, self.plan.num_rounds, self.store, self.live.measure, report)


def _nothing_meets(trials: Sequence[Trial], goal: Goal, where: str) -> TuneError:
    nearest = nearest_trial(trials, goal)
    if nearest is None or nearest.figures is None:
        reason = next((trial.error for trial in reversed(trials) if trial.error), "there was none")
        return TuneError(f"no trial {where} had figures; the last failed: {reason}")
    return TuneError(
        f"nothing that was tried meets the constraints {where}. The nearest, {describe(nearest.point)}, misses "
        f"{', '.join(goal.missed(nearest.figures))}: loosen the constraint, or add lower loads"
    )
