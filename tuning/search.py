"""The search: Optuna proposes points, the best of which are found by measuring few of them."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from sluice.tuning.errors import TrialFailedError
from sluice.tuning.figures import Figures, Goal
from sluice.tuning.space import Dimension, Point, SearchSpace
from sluice.tuning.steps import ConsoleSteps
from sluice.tuning.trials import Stage, Trial, TrialStore

_MOST_REPETITIONS = 100
"""Proposals in a row of points that are known already, after which the search has nothing new."""

_NOUNS = {
    Stage.SIMULATED: "trials in the simulator",
    Stage.SCALED: "trials in the simulator, with scaled costs",
    Stage.LIVE: "trials on servers",
}

Measure = Callable[[Point], Awaitable[Figures]]
"""Measures a point. Raises TrialFailedError."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The bounds of a search. `num_trials` counts points that were measured, in this run or before."""

    stage: Stage
    num_trials: int
    seed: int
    first: tuple[Point, ...] = ()
    """Points to try after the defaults, before the optimiser proposes any."""


async def search(
    space: SearchSpace,
    goal: Goal,
    settings: SearchSettings,
    store: TrialStore,
    measure: Measure,
    report: Callable[[Trial], None],
) -> list[Trial]:
    """Measure points until there are `num_trials`, the defaults at every load first. Returns the search's trials."""
    study = _study(space, goal, settings, store)
    is_whole = space.size <= settings.num_trials
    first = _all_points(space) if is_whole else [*map(space.default_point, space.load.values), *settings.first]
    num_repeated = 0
    while len(list(store.of(settings.stage))) < settings.num_trials and num_repeated < _MOST_REPETITIONS:
        planned = next((point for point in first if store.find(settings.stage, point) is None), None)
        if planned is not None:
            study.enqueue_trial(space.encode(planned))
        elif is_whole:
            break
        proposed = study.ask(_distributions(space))
        point = space.decode(proposed.params)
        known = store.find(settings.stage, point)
        trial = known or await measured(store, settings.stage, point, measure)
        _tell(study, proposed, goal, trial.figures)
        num_repeated = num_repeated + 1 if known else 0
        if not known:
            report(trial)
    return list(store.of(settings.stage))


async def counted_search(
    space: SearchSpace, goal: Goal, settings: SearchSettings, store: TrialStore, measure: Measure, steps: ConsoleSteps
) -> list[Trial]:
    """Do the same, and show how many trials there have been."""
    planned = replace(settings, num_trials=min(settings.num_trials, space.size))
    num_done = len(list(store.of(settings.stage)))
    async with steps.counting(_NOUNS[settings.stage], num_done, planned.num_trials) as report:
        return await search(space, goal, planned, store, measure, report)


async def measured(store: TrialStore, stage: Stage, point: Point, measure: Measure, round_number: int = 0) -> Trial:
    """Measure a point and keep the trial, one that failed too."""
    began = time.perf_counter()
    try:
        figures, error = await measure(point), ""
    except TrialFailedError as failure:
        figures, error = None, str(failure)
    return store.add(stage, point, figures, error, time.perf_counter() - began, round_number)


def _all_points(space: SearchSpace) -> list[Point]:
    """Return every point once, those of the defaults first."""
    points = [*map(space.default_point, space.load.values), *space.points()]
    return list({str(sorted(point.items())): point for point in points}.values())


def _distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    return {each.name: _distribution(each) for each in space.dimensions}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.is_ordered:
        return IntDistribution(0, len(dimension.values) - 1)
    return CategoricalDistribution([str(value) for value in dimension.values])


def _study(space: SearchSpace, goal: Goal, settings: SearchSettings, store: TrialStore) -> optuna.Study:
    """Return a study that knows the trials of the stage that were kept, of this run or of one that was stopped."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize" if goal.objective.is_maximized else "minimize",
        sampler=optuna.samplers.TPESampler(seed=settings.seed, multivariate=True),
    )
    distributions = _distributions(space)
    for trial in store.of(settings.stage):
        study.enqueue_trial(space.encode(trial.point))
        _tell(study, study.ask(distributions), goal, trial.figures)
    return study


def _tell(study: optuna.Study, proposed: optuna.Trial, goal: Goal, figures: Figures | None) -> None:
    for name, violation in goal.violations(figures).items():
        proposed.set_constraint(name, violation)
    study.tell(proposed, (figures or {}).get(goal.objective.figure, 0.0))
