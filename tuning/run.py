"""One whole tuning: learn, search, compare with the default settings in turns."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from sluice.tuning.comparison import (
    MeasureSeeded,
    TuningVerdict,
    best_trials,
    defaults_among,
    judge,
    nothing_meets,
    run_rounds,
)
from sluice.tuning.driving import LiveMeasurer, TunePlan
from sluice.tuning.errors import TrialFailedError, TuneError
from sluice.tuning.figures import Goal
from sluice.tuning.language_model import LanguageModelSubject
from sluice.tuning.search import SearchSettings, counted_search
from sluice.tuning.server import running_server
from sluice.tuning.simulated_search import SimulatedSearch
from sluice.tuning.simulating import Simulator
from sluice.tuning.space import Point, SearchSpace, describe
from sluice.tuning.steps import ConsoleSteps
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
    steps: ConsoleSteps

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


_LARGE_SPACE = 10_000


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuning that has ended."""

    plan: TunePlan
    space: SearchSpace
    store: TrialStore
    rounds: Sequence[tuple[Trial, Trial]]
    verdict: TuningVerdict

    @property
    def shown_stages(self) -> tuple[Stage, Stage]:
        """The stages to show: the last search in the simulator, and servers."""
        is_scaled = any(self.store.of(Stage.SCALED))
        return Stage.SCALED if is_scaled else Stage.SIMULATED, Stage.LIVE

    @property
    def searched(self) -> list[Trial]:
        """The trials of the search."""
        return list(self.store.of(Stage.LIVE if self.plan.is_live else Stage.SIMULATED))


async def tune(plan: TunePlan, steps: ConsoleSteps) -> Tuning:
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
    steps: ConsoleSteps
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
        trials = await self._search(space, simulator)
        decision = TuningDecision(plan.goal, plan.num_rounds, space, self.store, self.live.measure, self.steps)
        rounds, verdict = await decision.decide(trials)
        return Tuning(plan, space, self.store, rounds, verdict)

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

    async def _search(self, space: SearchSpace, simulator: Simulator | None) -> list[Trial]:
        """Return the trials on servers of a search."""
        plan = self.plan
        if simulator is not None:
            return await SimulatedSearch(plan, space, self.store, simulator, self.live.measure, self.steps).run()
        settings = SearchSettings(Stage.LIVE, plan.num_trials, plan.seed)
        return await counted_search(space, plan.goal, settings, self.store, self.live.measure, self.steps)
