"""What is claimed of a point that was found: only what the rounds show beyond noise."""

from pathlib import Path

from sluice.tuning.comparison import best_trials, judge, nearest_trial, run_rounds
from sluice.tuning.errors import TrialFailedError
from sluice.tuning.figures import FigureConstraint, Figures, Goal, Objective
from sluice.tuning.space import Dimension, Point, SearchSpace
from sluice.tuning.trials import Stage, Trial, TrialStore

SPACE = SearchSpace((Dimension("seqs", (8, 16), 16),), Dimension("concurrency", (1, 4, 16), 1))
GOAL = Goal(Objective("tokens_per_s"), (FigureConstraint.parse("p99_ttft<=100"),))
DEFAULT = SPACE.default_point(4)
FOUND: Point = DEFAULT | {"seqs": 8}
POINTS = (DEFAULT, FOUND)


def trial(point: Point, rate: float, ttft: float = 50.0, number: int = 1) -> Trial:
    return Trial(number=number, stage=Stage.LIVE, point=point, figures={"tokens_per_s": rate, "p99_ttft": ttft})


def rounds(rates: list[tuple[float, float]], ttfts: tuple[float, float] = (50.0, 50.0)) -> list[tuple[Trial, Trial]]:
    return [(trial(DEFAULT, a, ttfts[0]), trial(FOUND, b, ttfts[1])) for a, b in rates]


BETTER = [(100.0, 120.0), (101.0, 119.0), (99.0, 121.0), (100.0, 122.0), (102.0, 120.0)]
ALIKE = [(100.0, 104.0), (101.0, 96.0), (99.0, 103.0), (100.0, 97.0), (102.0, 101.0)]


def test_what_is_better_in_the_rounds_is_to_be_used() -> None:
    verdict = judge(POINTS, rounds(BETTER), GOAL)
    assert verdict.is_found_better
    assert verdict.chosen == FOUND
    assert verdict.reason.startswith("1.20 times the defaults' tokens_per_s (120.0 against 100.0; 95 % sure: 1.1")
    assert verdict.missed == ()


def test_a_difference_within_noise_is_no_claim() -> None:
    verdict = judge(POINTS, rounds(ALIKE), GOAL)
    assert verdict.chosen == DEFAULT
    assert verdict.reason.startswith("no difference beyond noise")


def test_what_is_worse_in_the_rounds_is_not_used() -> None:
    verdict = judge(POINTS, rounds([(b, a) for a, b in BETTER]), GOAL)
    assert verdict.chosen == DEFAULT
    assert verdict.reason.startswith("in the rounds it was worse")


def test_a_constraint_that_the_defaults_miss_decides() -> None:
    verdict = judge(POINTS, rounds(ALIKE, (130.0, 90.0)), GOAL)
    assert verdict.chosen == FOUND
    assert "the default settings miss p99_ttft<=100 (130.0 ms)" in verdict.reason
    assert verdict.missed == ()


def test_a_constraint_that_both_miss_is_said() -> None:
    verdict = judge(POINTS, rounds(BETTER, (130.0, 110.0)), GOAL)
    assert verdict.chosen == DEFAULT
    assert verdict.missed == ("p99_ttft<=100 (130.0 ms)",)
    assert judge(POINTS, rounds(BETTER, (90.0, 110.0)), GOAL).missed == ()


def test_a_run_that_fails_makes_no_winner_of_its_own() -> None:
    broken = Trial(number=9, stage=Stage.ROUND, point=FOUND, figures=None, error="2 of 9 requests failed")
    verdict = judge(POINTS, [*rounds(BETTER), (trial(DEFAULT, 100.0), broken)], GOAL)
    assert verdict.chosen == DEFAULT
    assert "2 of 9 requests failed" in verdict.reason


def test_the_best_of_each_load_come_first() -> None:
    trials = [
        trial({"seqs": 16, "concurrency": 16}, 300.0, 80.0),
        trial({"seqs": 8, "concurrency": 16}, 310.0, 120.0),
        trial({"seqs": 16, "concurrency": 4}, 200.0),
        trial({"seqs": 8, "concurrency": 4}, 210.0),
        trial({"seqs": 8, "concurrency": 1}, 90.0),
    ]
    best = best_trials(trials, GOAL, SPACE, 4)
    assert [each.figures["tokens_per_s"] for each in best if each.figures] == [300.0, 210.0, 90.0, 200.0]


def test_the_nearest_misses_by_least() -> None:
    trials = [trial(FOUND, 1.0, 200.0), trial(DEFAULT, 1.0, 120.0)]
    assert nearest_trial(trials, GOAL) is trials[1]
    assert nearest_trial([], GOAL) is None


async def test_rounds_are_made_in_turns_with_requests_of_their_own(tmp_path: Path) -> None:
    calls: list[tuple[Point, int]] = []

    async def measure(point: Point, seed: int) -> Figures:
        calls.append((point, seed))
        if len(calls) == 3:
            raise TrialFailedError("the server did not start")
        return {"tokens_per_s": 1.0}

    store = TrialStore.open(tmp_path, {})
    made = await run_rounds(POINTS, 5, store, measure, lambda trial: None)
    order = [point for point, _ in calls]
    assert order == [DEFAULT, FOUND, FOUND, DEFAULT, DEFAULT, FOUND, FOUND, DEFAULT, DEFAULT, FOUND]
    assert [seed for _, seed in calls] == [1001, 1001, 1002, 1002, 1003, 1003, 1004, 1004, 1005, 1005]
    assert [pair[1].error for pair in made] == ["", "the server did not start", "", "", ""]
    again = TrialStore.open(tmp_path, {})
    assert await run_rounds(POINTS, 5, again, measure, lambda trial: None) == made
    assert len(calls) == 10


def test_of_equal_trials_the_one_nearest_to_the_defaults_counts() -> None:
    trials = [trial(FOUND, 100.0), trial(DEFAULT, 100.0), trial(FOUND | {"concurrency": 1}, 90.0)]
    assert best_trials(trials, GOAL, SPACE, 9) == trials[1:]
