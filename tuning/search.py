"""The search: Optuna proposes points, the best of which are found by measuring few of them."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tuning.errors import TrialFailedError
from tuning.figures import Figures, Goal
from tuning.space import Dimension, Point, SearchSpace
from tuning.trials import Stage, Trial, TrialStore

JOURNAL_FILE = "optuna.journal"
STUDY_NAME = "sluice tune"
_MOST_REPETITIONS = 100
"""Proposals in a row of points that are known already, after which the search has nothing new."""

Measure = Callable[[Point], Awaitable[Figures]]
"""Measures a point. Raises TrialFailedError."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How far a search goes. `num_trials` counts points that were measured, in this run or before."""

    stage: Stage
    num_trials: int
    seed: int


async def search(
    space: SearchSpace,
    goal: Goal,
    settings: SearchSettings,
    store: TrialStore,
    measure: Measure,
    report: Callable[[Trial], None],
) -> list[Trial]:
    """Measure points until there are `num_trials`, the defaults at every load first. Returns the search's trials."""
    study = _open_study(store.folder, goal, settings)
    distributions = {each.name: _distribution(each) for each in space.dimensions}
    is_whole = space.size <= settings.num_trials
    first = _all_points(space) if is_whole else [space.default_point(load) for load in space.load.values]
    num_repeated = 0
    while len(list(store.of(settings.stage))) < settings.num_trials and num_repeated < _MOST_REPETITIONS:
        planned = next((point for point in first if store.find(settings.stage, point) is None), None)
        if planned is not None:
            study.enqueue_trial(space.encode(planned))
        elif is_whole:
            break
        proposed = study.ask(distributions)
        point = space.decode(proposed.params)
        known = store.find(settings.stage, point)
        trial = known or await measured(store, settings.stage, point, measure)
        for name, violation in goal.violations(trial.figures).items():
            proposed.set_constraint(name, violation)
        study.tell(proposed, (trial.figures or {}).get(goal.objective.figure, 0.0))
        num_repeated = num_repeated + 1 if known else 0
        if not known:
            report(trial)
    return list(store.of(settings.stage))


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


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.is_ordered:
        return IntDistribution(0, len(dimension.values) - 1)
    return CategoricalDistribution([str(value) for value in dimension.values])


def _open_study(folder: Path, goal: Goal, settings: SearchSettings) -> optuna.Study:
    """Open the study in the folder. What a run that was stopped had asked for is given up."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
        study_name=STUDY_NAME,
        load_if_exists=True,
        direction="maximize" if goal.objective.is_maximized else "minimize",
        sampler=optuna.samplers.TPESampler(seed=settings.seed, multivariate=True),
    )
    for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(left.number, state=TrialState.FAIL)
    return study
