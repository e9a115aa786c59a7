"""Objectives and constraints, and the figures that they are held against."""

import pytest

from sluice.engine.simulation.fleet import FleetConfig, simulate
from sluice.engine.simulation.profile import bundled_profile
from sluice.engine.simulation.traces import TracedRequest
from sluice.load.config import Slo
from sluice.tuning.errors import TuneError
from sluice.tuning.figures import FigureConstraint, Goal, Objective, figures_of_simulation, format_figure


@pytest.mark.parametrize(
    ("text", "figure", "bound"),
    [
        ("p99_ttft<=500", "p99_ttft", 500.0),
        ("p99_ttft<=0.5s", "p99_ttft", 500.0),
        (" mean_itl <= 20 ms ", "mean_itl", 20.0),
        ("memory<=4G", "memory", float(4 << 30)),
        ("gpu_memory<=512MiB", "gpu_memory", float(512 << 20)),
        ("requests_per_s>=2.5", "requests_per_s", 2.5),
    ],
)
def test_a_constraint_has_a_figure_and_a_bound_with_a_unit(text: str, figure: str, bound: float) -> None:
    parsed = FigureConstraint.parse(text)
    assert (parsed.figure, parsed.bound) == (figure, bound)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p99_ttft", "write a constraint as"),
        ("p99_ttft<500", "write a constraint as"),
        ("p98_ttft<=500", "there is no figure p98_ttft"),
        ("p99_ttft<=5G", "units: ms, s"),
        ("memory<=4s", "is no value of memory"),
        ("goodput>=1G", "is no value of goodput"),
        ("memory<=1.2.3G", "is no value of memory"),
    ],
)
def test_what_is_no_constraint_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        FigureConstraint.parse(text)


def test_rates_are_made_large_and_the_rest_small() -> None:
    assert Objective.parse("goodput").is_maximized
    assert not Objective.parse("p99_e2e").is_maximized
    assert Objective("memory").is_better(1.0, 2.0)
    with pytest.raises(TuneError, match="no figure tokens"):
        Objective.parse("tokens")


def test_a_violation_is_relative_to_the_bound() -> None:
    figures = {"p99_ttft": 600.0, "requests_per_s": 8.0}
    assert FigureConstraint.parse("p99_ttft<=500").violation(figures) == pytest.approx(0.2)
    assert FigureConstraint.parse("requests_per_s>=10").violation(figures) == pytest.approx(0.2)
    assert FigureConstraint.parse("requests_per_s>=8").violation(figures) == 0.0
    assert FigureConstraint.parse("memory<=1G").violation(figures) is None


def test_a_goal_is_met_by_the_figures_that_there_are() -> None:
    goal = Goal(
        Objective("tokens_per_s"), (FigureConstraint.parse("p99_ttft<=500"), FigureConstraint.parse("memory<=1G"))
    )
    assert goal.is_met({"tokens_per_s": 1.0, "p99_ttft": 500.0})
    assert not goal.is_met({"tokens_per_s": 1.0, "p99_ttft": 501.0})
    assert not goal.is_met({"p99_ttft": 1.0})
    assert not goal.is_met(None)
    assert goal.missed({"p99_ttft": 501.0, "memory": 1.0}) == ["p99_ttft<=500 (501.0 ms)"]
    assert goal.shown_figures == ("tokens_per_s", "p99_ttft", "memory")


def test_figures_are_shown_with_their_units() -> None:
    assert format_figure("memory", 3 << 30) == "3,072 MiB"
    assert format_figure("p99_ttft", 1250.0) == "1.25 s"
    assert format_figure("tokens_per_s", 12345.6) == "12,346"
    assert format_figure("goodput", None) == "-"


def test_a_simulation_has_the_figures_of_a_run() -> None:
    requests = [TracedRequest(0.1 * number, 64, 32) for number in range(20)]
    run = simulate(requests, FleetConfig(bundled_profile(), 1))
    figures = figures_of_simulation(run, Slo(ttft_ms=1e6))
    assert figures["p50_ttft"] == pytest.approx(float(run.ttft_s[10]) * 1e3, rel=0.2)
    assert figures["goodput"] == figures["requests_per_s"]
    assert figures["tokens_per_s"] == pytest.approx(32 * figures["requests_per_s"])
    assert figures["mean_tpot"] == pytest.approx(figures["mean_itl"], rel=0.05)
    assert "memory" not in figures
    assert figures_of_simulation(run, Slo(e2e_ms=1e-3))["goodput"] == 0.0
    too_long = simulate([TracedRequest(0.0, 10_000, 1)], FleetConfig(bundled_profile(), 1))
    assert figures_of_simulation(too_long, None) == {}
