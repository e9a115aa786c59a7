"""A point that met a constraint by luck gives way to the next best."""

from pathlib import Path
from typing import cast

from sluice.tuning.comparison import TuningVerdict
from sluice.tuning.figures import FigureConstraint, Figures, Goal, Objective
from sluice.tuning.run import TuningDecision
from sluice.tuning.space import Dimension, Point, SearchSpace
from sluice.tuning.trials import Stage, TrialStore
from tests.tuning.heard_steps import HeardSteps

SPACE = SearchSpace((Dimension("seqs", (2, 4, 8, 16), 16),), Dimension("concurrency", (1, 4), 1))
GOAL = Goal(Objective("tokens_per_s"), (FigureConstraint.parse("p99_ttft<=100"),))
SEARCHED = {16: (90.0, 120.0), 8: (130.0, 95.0), 4: (110.0, 90.0), 2: (80.0, 50.0)}
"""Tokens a second and TTFT by the setting, as the search saw them."""


NUM_ROUNDS = 5


async def decide(
    folder: Path, ttfts: dict[int, float], default_ttft: float = 120.0
) -> tuple[TuningVerdict, HeardSteps]:
    """Decide where the rounds see these TTFTs, by the setting."""
    store, steps = TrialStore.open(folder, {}), HeardSteps()
    trials = [
        store.add(
            Stage.LIVE, SPACE.default_point(4) | {"seqs": seqs}, {"tokens_per_s": rate, "p99_ttft": ttft}, "", 1.0
        )
        for seqs, (rate, ttft) in SEARCHED.items()
    ]

    async def measure(point: Point, seed: int) -> Figures:
        seqs = cast(int, point["seqs"])
        return {"tokens_per_s": SEARCHED[seqs][0], "p99_ttft": ttfts.get(seqs, 120.0)}

    decision = TuningDecision(GOAL, NUM_ROUNDS, SPACE, store, measure, steps)
    rounds, verdict = await decision.decide(trials)
    assert len(rounds) == NUM_ROUNDS
    numbers = [trial.round for trial in store.of(Stage.ROUND) if trial.point["seqs"] != 16]
    assert numbers == [*range(1, len(numbers) + 1)], "each of the points has rounds, and seeds, of its own"
    assert {trial.point["seqs"] for trial in rounds[0]} == {16, verdict.found["seqs"]}
    return verdict, steps


async def test_the_best_is_used_where_it_keeps_to_the_constraint(tmp_path: Path) -> None:
    verdict, steps = await decide(tmp_path, {8: 95.0})
    assert (verdict.chosen["seqs"], steps.lines) == (8, [])


async def test_the_next_best_is_used_where_the_best_was_lucky(tmp_path: Path) -> None:
    verdict, steps = await decide(tmp_path, {8: 130.0, 4: 90.0})
    assert (verdict.chosen["seqs"], verdict.missed) == (4, ())
    [line] = steps.lines
    assert "what was found misses p99_ttft<=100 (130.0 ms) in the rounds; the next best is seqs=4" in line


async def test_the_defaults_stay_where_all_were_lucky(tmp_path: Path) -> None:
    verdict, steps = await decide(tmp_path, {8: 130.0, 4: 130.0, 2: 130.0})
    assert (verdict.chosen["seqs"], verdict.was_luck) == (16, True)
    assert verdict.missed == ("p99_ttft<=100 (120.0 ms)",)
    assert len(steps.lines) == 2
