"""The search for a language model: in the simulator, the best points on servers, and once more with the costs of steps
scaled to what servers measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.errors import SluiceError
from sluice.tuning.comparison import best_trials, defaults_among, nearest_trial, nothing_meets
from sluice.tuning.driving import TunePlan
from sluice.tuning.scaling import (
    TPOT,
    CostScale,
    LoadFactor,
    gap_names,
    keep_scale,
    read_scale,
    scale_of,
    simulation_gaps,
)
from sluice.tuning.search import Measure, SearchSettings, counted_search, measured
from sluice.tuning.simulating import Simulator
from sluice.tuning.space import Point, SearchSpace, describe
from sluice.tuning.steps import ConsoleSteps
from sluice.tuning.trials import Stage, Trial, TrialStore


@dataclass(frozen=True, slots=True)
class SimulatedSearch:
    """A search in the simulator that servers correct. `measure_live` measures a point on a server."""

    plan: TunePlan
    space: SearchSpace
    store: TrialStore
    simulator: Simulator
    measure_live: Measure
    steps: ConsoleSteps

    async def run(self) -> list[Trial]:
        """Search, measure the best points on servers, scale the costs by them, and do both once more. Returns the
        trials on servers. Raises TuneError where no simulated trial has figures."""
        checked = await self._check(await self._search(Stage.SIMULATED))
        scale = await self._scale(checked)
        if scale is None or scale.agrees:
            return checked
        self.simulator.scale = scale
        again = await self._check(await self._search(Stage.SCALED, tuple(trial.point for trial in checked)))
        self._say_gaps(Stage.SCALED)
        return list({trial.number: trial for trial in (*checked, *again)}.values())

    async def _search(self, stage: Stage, first: tuple[Point, ...] = ()) -> list[Trial]:
        plan = self.plan
        settings = SearchSettings(stage, plan.num_trials, plan.seed, first)
        return await counted_search(self.space, plan.goal, settings, self.store, self.simulator.measure, self.steps)

    async def _scale(self, checked: Sequence[Trial]) -> CostScale | None:
        """Return the factors of the costs by which the simulator is as fast as servers were; None where no trial tells.
        Those of a run that was stopped count on."""
        scale = read_scale(self.plan.folder)
        if scale is None:
            self.steps.note("scaling the simulator's costs to the servers")
            found = [factor for trial in checked if (factor := await self._factor(trial)) is not None]
            if not found:
                self.steps.say("no point tells by how much servers are slower than simulated: costs stay as they are")
                return None
            scale = scale_of(found)
            keep_scale(self.plan.folder, scale)
        self._say_gaps(Stage.SIMULATED)
        then = "near enough for one search" if scale.agrees else "searching again with them"
        self.steps.say(f"costs as on servers, by {self.plan.drive.load_name}: times {scale}; {then}")
        return scale

    async def _factor(self, trial: Trial) -> LoadFactor | None:
        tpot_ms = (trial.figures or {}).get(TPOT)
        if tpot_ms is None:
            return None
        try:
            factor = await self.simulator.factor(trial.point, tpot_ms / 1e3)
        except SluiceError as error:
            self.steps.say(f"{describe(trial.point)}: {error.message}")
            return None
        return LoadFactor(float(trial.point[self.plan.drive.load_name]), factor)

    def _say_gaps(self, stage: Stage) -> None:
        gaps = simulation_gaps(self.store, stage, gap_names(self.plan.goal))
        if gaps:
            costs = "calibrated" if stage is Stage.SIMULATED else "scaled"
            shown = ", ".join(f"{each.figure} {each}" for each in gaps)
            self.steps.say(f"measured / simulated with {costs} costs, over {gaps[0].num_points} points: {shown}")

    async def _check(self, trials: Sequence[Trial]) -> list[Trial]:
        """Measure on servers the best simulated points, and the default settings at their best simulated loads."""
        points = self._points_to_check(trials)
        num_done = sum(self.store.find(Stage.LIVE, point) is not None for point in points)
        async with self.steps.counting("points checked on servers", num_done, len(points)) as report:
            for point in points:
                if self.store.find(Stage.LIVE, point) is None:
                    report(await measured(self.store, Stage.LIVE, point, self.measure_live))
        return [trial for point in points if (trial := self.store.find(Stage.LIVE, point)) is not None]

    def _points_to_check(self, trials: Sequence[Trial]) -> list[Point]:
        """Return the points, each once. Where none meets the constraints in the simulator it is the nearest, as servers
        may be faster. Raises TuneError where no trial has figures."""
        plan, space = self.plan, self.space
        nearest = nearest_trial(trials, plan.goal)
        if nearest is None:
            raise nothing_meets(trials, plan.goal, "in the simulator")
        best = best_trials(trials, plan.goal, space, plan.num_checked) or [nearest]
        defaults = defaults_among(trials, space)
        best_defaults = best_trials(defaults, plan.goal, space, max(plan.num_checked // 2, 1))
        at_same_load = space.default_point(best[0].point[space.load.name])
        points = [trial.point for trial in (*best, *best_defaults)]
        points += [] if best_defaults else [at_same_load]
        # Neighbours have the same settings, so that one server measures them.
        unique = {describe(point): point for point in points}.values()
        return sorted(unique, key=lambda point: describe(space.settings_of(point)))
