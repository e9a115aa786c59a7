"""The search in the simulator that servers correct. The server here is the simulator itself, with other costs."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sluice.engine.simulation.profile import bundled_profile
from sluice.load.config import ApiKind, TokenRange, Workload
from sluice.tuning.driving import CONCURRENCY, Drive, TunePlan
from sluice.tuning.errors import TuneError
from sluice.tuning.figures import FigureConstraint, Figures, Goal, Objective
from sluice.tuning.language_model import EngineLimits, LanguageModelSubject
from sluice.tuning.scaling import CostScale, LoadFactor, read_scale, scale_of, simulation_gaps
from sluice.tuning.simulated_search import SimulatedSearch
from sluice.tuning.simulating import Simulator
from sluice.tuning.space import Dimension, Point
from sluice.tuning.trials import Stage, TrialStore
from tests.tuning.heard_steps import HeardSteps

LIMITS = EngineLimits("openvino", 64, 2048, 1024, 1092, 32)
LOAD = Dimension(CONCURRENCY, (2, 16), 2)
SEARCHED = {"max-num-seqs": (4, 64), "max-num-batched-tokens": (512,)}


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are short: a search needs no more of them here than to tell points apart."""
    monkeypatch.setattr("sluice.tuning.simulating._LEAST_REQUESTS", 24)
    monkeypatch.setattr("sluice.tuning.simulating._REQUESTS_OF_CLIENT", 2)


@dataclass
class SlowServers:
    """Servers that are as a simulator, and a record of the points that they measure."""

    simulator: Simulator
    points: list[Point] = field(default_factory=list)

    async def __call__(self, point: Point) -> Figures:
        self.points.append(point)
        return await self.simulator.measure(point)


def simulator_in(folder: Path, scale: CostScale | None = None, kind: type[Simulator] = Simulator) -> Simulator:
    subject = LanguageModelSubject(None, (), SEARCHED, LOAD, limits=LIMITS)
    workload = Workload(TokenRange(16, 64), TokenRange(8, 16), seed=3)
    made = kind(subject, Drive(ApiKind.COMPLETIONS, None, workload, LOAD.name, 5.0, 60.0, None), folder, print)
    made._profiles[""] = bundled_profile()
    made.scale = scale
    return made


def slow(folder: Path, few: float, many: float) -> SlowServers:
    """Servers whose costs are the calibrated ones times `few` with 2 clients and `many` with 16."""
    return SlowServers(simulator_in(folder, CostScale((LoadFactor(2, few), LoadFactor(16, many)))))


def search_in(
    folder: Path,
    servers: SlowServers,
    steps: HeardSteps,
    bound: str = "p99_ttft<=60000",
    kind: type[Simulator] = Simulator,
) -> SimulatedSearch:
    simulator = simulator_in(folder, kind=kind)
    goal = Goal(Objective("tokens_per_s"), (FigureConstraint.parse(bound),))
    plan = TunePlan(simulator.subject, simulator.drive, goal, folder, False, None, 8, 2, 5, 0, {})
    return SimulatedSearch(plan, simulator.subject.space, TrialStore.open(folder, {}), simulator, servers, steps)


async def test_costs_are_scaled_to_servers_and_searched_again(tmp_path: Path) -> None:
    servers, steps = slow(tmp_path, 1.2, 2.0), HeardSteps()
    search = search_in(tmp_path, servers, steps)
    live = await search.run()
    assert [trial.stage for trial in live] == [Stage.LIVE] * len(servers.points)
    assert len(list(search.store.of(Stage.SCALED))) == 8
    scale = read_scale(tmp_path)
    assert scale is not None
    assert [each.load for each in scale.factors] == [2, 16]
    assert [each.factor for each in scale.factors] == pytest.approx([1.2, 2.0], rel=0.03)
    [before] = simulation_gaps(search.store, Stage.SIMULATED, ["mean_tpot"])
    [after] = simulation_gaps(search.store, Stage.SCALED, ["mean_tpot"])
    assert before.most == pytest.approx(2.0, rel=0.1)
    assert (after.least, after.most) == pytest.approx((1.0, 1.0), rel=0.03)
    assert any(line.startswith("costs as on servers, by concurrency: times 1.2") for line in steps.lines)
    assert any("with scaled costs" in line and "mean_tpot 1.00" in line for line in steps.lines)


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


class StoppedSimulator(Simulator):
    """A simulator that is stopped as soon as its costs are scaled."""

    async def measure(self, point: Point) -> Figures:
        if self.scale is not None:
            raise Stopped
        return await Simulator.measure(self, point)


async def test_a_search_that_was_stopped_goes_on_with_its_scale(tmp_path: Path) -> None:
    """The second search is stopped; the same command measures no point twice, and ends where a whole search does."""
    expected = await search_in(tmp_path / "whole", slow(tmp_path, 1.5, 1.5), HeardSteps()).run()
    servers = slow(tmp_path, 1.5, 1.5)
    with pytest.raises(Stopped):
        await search_in(tmp_path / "stopped", servers, HeardSteps(), kind=StoppedSimulator).run()
    assert servers.points
    again = await search_in(tmp_path / "stopped", servers, HeardSteps()).run()
    assert [(trial.point, trial.figures) for trial in again] == [(trial.point, trial.figures) for trial in expected]
    assert len({str(point) for point in servers.points}) == len(servers.points)


async def test_servers_that_are_as_simulated_are_searched_once(tmp_path: Path) -> None:
    steps = HeardSteps()
    search = search_in(tmp_path, slow(tmp_path, 1.0, 1.05), steps)
    await search.run()
    assert not list(search.store.of(Stage.SCALED))
    assert steps.lines[-1].endswith("near enough for one search")


async def test_where_nothing_meets_a_bound_in_the_simulator_servers_decide(tmp_path: Path) -> None:
    """Servers are twice as fast as calibrated, so that they meet what no simulated point does."""
    fastest = simulator_in(tmp_path)
    simulated = [await fastest.measure(point) for point in fastest.subject.space.points()]
    bound = 0.7 * min(figures["p50_e2e"] for figures in simulated)
    search = search_in(tmp_path, slow(tmp_path, 0.5, 0.5), HeardSteps(), f"p50_e2e<={bound:.3f}")
    live = await search.run()
    assert any(search.plan.goal.is_met(trial.figures) for trial in live)


async def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    (tmp_path / "scale.json").write_text("{")
    with pytest.raises(TuneError, match=r"scale\.json is damaged"):
        read_scale(tmp_path)


def test_a_scale_lies_between_the_loads_that_were_measured() -> None:
    scale = scale_of([LoadFactor(16, 2.0), LoadFactor(1, 1.0), LoadFactor(16, 1.125)])
    assert scale == CostScale((LoadFactor(1.0, 1.0), LoadFactor(16.0, 1.5)))
    assert scale.at(4) == pytest.approx(1.5**0.5)
    assert (scale.at(0.5), scale.at(64)) == pytest.approx((1.0, 1.5))
    assert not scale.agrees
