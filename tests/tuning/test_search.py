"""The search, with figures from a formula in place of servers."""

from pathlib import Path

import pytest

from sluice.tuning.errors import TrialFailedError, TuneError
from sluice.tuning.figures import FigureConstraint, Figures, Goal, Objective
from sluice.tuning.search import SearchSettings, search
from sluice.tuning.space import Dimension, Point, SearchSpace
from sluice.tuning.trials import Stage, Trial, TrialStore

SPACE = SearchSpace(
    (
        Dimension("seqs", (1, 2, 4, 8, 16, 32, 64), 64),
        Dimension("tokens", (64, 128, 256, 512, 1024, 2048), 2048),
        Dimension("mode", ("plain", "quick"), "plain"),
    ),
    Dimension("concurrency", (1, 2, 4, 8, 16, 32), 1),
)
GOAL = Goal(Objective("tokens_per_s"), (FigureConstraint.parse("p99_ttft<=100"),))


class Measured:
    """More of everything is more throughput; more concurrency than sequences waits."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    async def __call__(self, point: Point) -> Figures:
        self.points.append(point)
        seqs, tokens, load = (int(point[name]) for name in ("seqs", "tokens", "concurrency"))
        if tokens == 64 and seqs == 64:
            raise TrialFailedError("the server did not start")
        gain = 1.5 if point["mode"] == "quick" else 1.0
        ttft = 10.0 * load / min(seqs, load) + 20_000.0 / tokens + load
        return {"tokens_per_s": gain * 100.0 * min(seqs, load) ** 0.7, "p99_ttft": ttft}


def store_in(folder: Path) -> TrialStore:
    return TrialStore.open(folder, {"model": "m"})


async def run(store: TrialStore, measure: Measured, num_trials: int, space: SearchSpace = SPACE) -> list[Trial]:
    seen: list[Trial] = []
    trials = await search(space, GOAL, SearchSettings(Stage.SIMULATED, num_trials, 1), store, measure, seen.append)
    assert len(seen) == len(measure.points)
    return trials


def best_of(trials: list[Trial]) -> float:
    return max(trial.figures["tokens_per_s"] for trial in trials if trial.figures and GOAL.is_met(trial.figures))


async def test_few_trials_come_close_to_the_best_of_all_points(tmp_path: Path) -> None:
    trials = await run(store_in(tmp_path), Measured(), 70)
    everything = Measured()
    best = 0.0
    for point in SPACE.points():
        try:
            figures = await everything(point)
        except TrialFailedError:
            continue
        best = max(best, figures["tokens_per_s"] if GOAL.is_met(figures) else 0.0)
    assert len(trials) == 70 < SPACE.size / 7
    assert best_of(trials) >= 0.9 * best


async def test_the_defaults_come_first_at_every_load(tmp_path: Path) -> None:
    measure = Measured()
    await run(store_in(tmp_path), measure, 8)
    assert measure.points[:6] == [SPACE.default_point(load) for load in SPACE.load.values]


async def test_no_point_is_measured_twice_and_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = Measured(), Measured()
    await run(store_in(tmp_path), first, 20)
    again = store_in(tmp_path)
    assert len(again.trials) == 20
    trials = await run(again, second, 35)
    assert len(trials) == 35
    assert len(second.points) == 15
    points = [str(point) for point in (*first.points, *second.points)]
    assert len(set(points)) == 35
    nothing = Measured()
    await run(store_in(tmp_path), nothing, 35)
    assert nothing.points == []


async def test_a_small_space_is_searched_as_a_whole(tmp_path: Path) -> None:
    space = SearchSpace(SPACE.settings[:1], SPACE.load)
    fixed: Point = {"tokens": 2048, "mode": "plain"}
    measure = Measured()

    async def measured(point: Point) -> Figures:
        return await measure(point | fixed)

    store = store_in(tmp_path)
    settings = SearchSettings(Stage.LIVE, 100, 0)
    trials = await search(space, GOAL, settings, store, measured, lambda trial: None)
    assert len(trials) == space.size == 42
    assert await search(space, GOAL, settings, store, measured, lambda trial: None) == trials
    assert len(measure.points) == 42


async def test_a_search_stopped_within_a_trial_goes_on(tmp_path: Path) -> None:
    class Stopped(Measured):
        async def __call__(self, point: Point) -> Figures:
            if len(self.points) == 7:
                raise KeyboardInterrupt
            return await super().__call__(point)

    with pytest.raises(KeyboardInterrupt):
        await run(store_in(tmp_path), Stopped(), 20)
    measure = Measured()
    assert len(await run(store_in(tmp_path), measure, 20)) == 20
    assert len(measure.points) == 13


async def test_a_point_that_fails_is_kept_with_its_reason(tmp_path: Path) -> None:
    space = SearchSpace((Dimension("seqs", (64,), 64), Dimension("tokens", (64, 128), 128)), SPACE.load)

    async def measured(point: Point) -> Figures:
        return await Measured()(point | {"mode": "plain"})

    settings = SearchSettings(Stage.LIVE, 12, 0)
    trials = await search(space, GOAL, settings, store_in(tmp_path), measured, lambda trial: None)
    failed = [trial for trial in trials if trial.figures is None]
    assert {trial.error for trial in failed} == {"the server did not start"}
    assert {trial.point["tokens"] for trial in failed} == {64}
    assert [trial.error for trial in store_in(tmp_path).trials] == [trial.error for trial in trials]


def test_a_folder_belongs_to_one_setup(tmp_path: Path) -> None:
    TrialStore.open(tmp_path, {"model": "m", "load": (1, 2)})
    TrialStore.open(tmp_path, {"model": "m", "load": [1, 2]})
    with pytest.raises(TuneError, match="a tuning with another load: repeat its command"):
        TrialStore.open(tmp_path, {"model": "m", "load": [1, 4]})


def test_a_damaged_trial_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(Stage.LIVE, {"a": 1}, {"memory": 1.0}, "", 0.5)
    path = tmp_path / "trials" / "00001.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TuneError, match=r"00001\.json is damaged .* delete it"):
        store_in(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=r"--out .* cannot be used"):
        store_in(tmp_path / "file")
