"""Compares what is found with the default settings: both are measured in turns, and only a difference beyond noise is
claimed."""

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sluice.load.compare import Comparison, compare_pairs
from sluice.tuning.errors import TuneError
from sluice.tuning.figures import RATES, Figures, Goal, format_figure
from sluice.tuning.search import measured
from sluice.tuning.space import Point, SearchSpace, describe
from sluice.tuning.trials import Stage, Trial, TrialStore

COMPARED = ("tokens_per_s", "requests_per_s", "goodput", "p50_ttft", "p99_ttft", "p99_itl", "p50_e2e", "p99_e2e")
_SEED_OF_ROUNDS = 1000
"""Added to the seed, so that no round sends the requests of the search, for which the point was chosen."""


MeasureSeeded = Callable[[Point, int], Awaitable[Figures]]
"""Measures a point with requests of a seed."""


@dataclass(frozen=True, slots=True)
class TuningVerdict:
    """A decision what to use. `found` and `default` are points, the latter at its own best load."""

    found: Point
    default: Point
    is_found_better: bool
    reason: str
    comparisons: tuple[Comparison, ...] = ()
    missed: tuple[str, ...] = ()
    """Constraints that what is to be used misses, in the median of the rounds."""
    was_luck: bool = False
    """Whether what was found misses a constraint in the rounds that it met in the search."""

    @property
    def chosen(self) -> Point:
        return self.found if self.is_found_better else self.default


def best_trials(trials: Sequence[Trial], goal: Goal, space: SearchSpace, count: int) -> list[Trial]:
    """Return trials that meet the constraints, the best first: those that are best at a load, then others. Of trials
    with equal figures, as simulated ones may have, it is the one with the fewest settings that are not the default."""
    met = [trial for trial in trials if trial.figures is not None and goal.is_met(trial.figures)]
    met.sort(key=lambda trial: (goal.objective.sort_key(trial.figures or {}), len(space.changed(trial.point))))
    different = list({str(trial.figures): trial for trial in reversed(met)}.values())[::-1]
    at_loads: dict[str, Trial] = {}
    for trial in different:
        at_loads.setdefault(str(trial.point[space.load.name]), trial)
    first = list(at_loads.values())
    return [*first, *(trial for trial in different if trial not in first)][:count]


def nearest_trial(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    """Return the trial that misses the constraints by least, None where none has figures."""
    with_figures = [trial for trial in trials if trial.figures]
    return min(
        with_figures, key=lambda trial: sum(map(_positive, goal.violations(trial.figures).values())), default=None
    )


def nothing_meets(trials: Sequence[Trial], goal: Goal, where: str) -> TuneError:
    """Return the error of a search none of whose trials meets the constraints, with the nearest."""
    nearest = nearest_trial(trials, goal)
    if nearest is None or nearest.figures is None:
        reason = next((trial.error for trial in reversed(trials) if trial.error), "there was none")
        return TuneError(f"no trial {where} had figures; the last failed: {reason}")
    return TuneError(
        f"nothing that was tried meets the constraints {where}. The nearest, {describe(nearest.point)}, misses "
        f"{', '.join(goal.missed(nearest.figures))}: loosen the constraint, or add lower loads"
    )


def _positive(value: float) -> float:
    return max(value, 0.0)


def defaults_among(trials: Sequence[Trial], space: SearchSpace) -> list[Trial]:
    """Return the trials of the default settings, at any load."""
    return [trial for trial in trials if space.is_default(trial.point)]


async def run_rounds(
    points: tuple[Point, Point],
    num_rounds: int,
    store: TrialStore,
    measure: MeasureSeeded,
    report: Callable[[Trial], None],
    num_before: int = 0,
) -> list[tuple[Trial, Trial]]:
    """Measure the default settings and what is found in turns; every second round begins with the other. The numbers
    of rounds follow on `num_before`."""
    rounds = []
    for number in range(num_before + 1, num_before + num_rounds + 1):
        trials: dict[int, Trial] = {}
        for place in (0, 1) if number % 2 else (1, 0):
            point = points[place]
            known = store.find(Stage.ROUND, point, number)
            if known is None:

                def seeded(point: Point, seed: int = _SEED_OF_ROUNDS + number) -> Awaitable[Figures]:
                    return measure(point, seed)

                known = await measured(store, Stage.ROUND, point, seeded, number)
                report(known)
            trials[place] = known
        rounds.append((trials[0], trials[1]))
    return rounds


def judge(points: tuple[Point, Point], rounds: Sequence[tuple[Trial, Trial]], goal: Goal) -> TuningVerdict:
    """Decide by the rounds whether what is found replaces the defaults: where it meets constraints that they miss, or
    is better beyond noise."""
    default, found = points
    failed = [trial for pair in rounds for trial in pair if trial.figures is None]
    if failed:
        is_default = failed[0].point == default
        which = "the default settings" if is_default else "what was found"
        reason = f"a run of {which} failed ({failed[0].error})"
        return TuningVerdict(found, default, is_default and not any(t.figures is None for _, t in rounds), reason)
    of_default, of_found = (_medians([pair[place] for pair in rounds]) for place in (0, 1))
    missed_by_default, missed_by_found = tuple(goal.missed(of_default)), tuple(goal.missed(of_found))
    comparisons = tuple(_compared(goal, rounds))
    if missed_by_found:
        reason = f"what was found misses {', '.join(missed_by_found)} in the rounds"
        return TuningVerdict(found, default, False, reason, comparisons, missed_by_default, was_luck=True)
    if missed_by_default:
        reason = f"the default settings miss {', '.join(missed_by_default)}, and what was found meets every constraint"
        return TuningVerdict(found, default, True, reason, comparisons)
    return _judge_objective(points, goal, comparisons)


def _judge_objective(points: tuple[Point, Point], goal: Goal, comparisons: tuple[Comparison, ...]) -> TuningVerdict:
    default, found = points
    name = goal.objective.figure
    compared = next((each for each in comparisons if each.name == name), None)
    if compared is None:
        return TuningVerdict(
            found, default, False, f"{name} was 0 in a round, so that nothing can be said", comparisons
        )
    low, high = compared.interval
    figures = f"{format_figure(name, compared.b)} against {format_figure(name, compared.a)}"
    ratio = f"{compared.ratio:.2f} times the defaults' {name} ({figures}; 95 % sure: {low:.2f} to {high:.2f})"
    if compared.verdict == "B is better":
        return TuningVerdict(found, default, True, ratio, comparisons)
    if compared.verdict == "B is worse":
        return TuningVerdict(found, default, False, f"in the rounds it was worse: {ratio}", comparisons)
    return TuningVerdict(found, default, False, f"no difference beyond noise: {ratio}", comparisons)


def _medians(trials: Sequence[Trial]) -> Figures:
    figures = [trial.figures or {} for trial in trials]
    names = set.intersection(*(set(each) for each in figures))
    return {name: statistics.median(each[name] for each in figures) for name in names}


def _compared(goal: Goal, rounds: Sequence[tuple[Trial, Trial]]) -> list[Comparison]:
    names = dict.fromkeys((*goal.shown_figures, *COMPARED))
    found = []
    for name in names:
        pairs = [((a.figures or {}).get(name), (b.figures or {}).get(name)) for a, b in rounds]
        compared = compare_pairs(name, pairs, name in RATES)
        if compared is not None:
            found.append(compared)
    return found
