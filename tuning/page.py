"""The report of a tuning as one HTML file: the picture of throughput against latency, and tables."""

import html
from collections.abc import Sequence

from sluice.load.run import read_machine_info
from sluice.plots import Line, Points, html_table, point_plot, render_report
from sluice.tuning.figures import RATES, Figures, format_figure, is_latency
from sluice.tuning.report import (
    COMPARISON_HEADER,
    GAP_HEADER,
    GAPS_TITLE,
    comparison_cells,
    gap_rows,
    header_of,
    row_of,
    shown_names,
    shown_trials,
    title_of,
    verdict_lines,
)
from sluice.tuning.run import Tuning
from sluice.tuning.space import describe
from sluice.tuning.trials import Stage, Trial

_GREY, _BLUE, _RED, _GREEN = "#999999", "#4477aa", "#cc6677", "#228833"
_PLACES = {
    Stage.SIMULATED: "in the simulator",
    Stage.SCALED: "in the simulator with costs as on servers",
    Stage.LIVE: "on servers",
}
_USUAL_LATENCIES = ("p99_ttft", "p99_e2e")


def render_page(tuning: Tuning, command: str) -> str:
    """Return the page."""
    machine = ", ".join(f"{name} {value}" for name, value in read_machine_info().items())
    names = shown_names(tuning)
    rows = [row_of(tuning, kind, trial, names) for kind, trial in shown_trials(tuning)]
    tables = [html_table(rows, header_of(tuning, names))]
    gaps = gap_rows(tuning)
    if gaps:
        tables.append(f"<h2>{html.escape(GAPS_TITLE)}</h2>" + html_table(gaps, GAP_HEADER))
    if tuning.verdict.comparisons:
        compared = [comparison_cells(each) for each in tuning.verdict.comparisons]
        title = f"<h2>{len(tuning.rounds)} rounds in turns: A the default settings, B what was found</h2>"
        tables.append(title + html_table(compared, COMPARISON_HEADER))
    return render_report(title_of(tuning), (command, *verdict_lines(tuning), machine), tables, _plots(tuning))


def _plots(tuning: Tuning) -> list[str]:
    axes = _axes(tuning)
    if axes is None:
        return ["<p>No trial has both a latency and a throughput.</p>"]
    latency, rate = axes
    plots = []
    for stage in tuning.shown_stages:
        trials = [trial for trial in tuning.store.of(stage) if _has(trial.figures, latency, rate)]
        if trials:
            where = _PLACES[stage]
            plots.append(_pareto(tuning, trials, latency, rate, f"{rate} against {latency}, {where}"))
    return plots


def _axes(tuning: Tuning) -> tuple[str, str] | None:
    """Return the latency and the rate to draw: those of the goal, else usual ones."""
    wanted = tuning.plan.goal.shown_figures
    latencies = [*filter(is_latency, wanted), *_USUAL_LATENCIES]
    rates = [*(name for name in wanted if name in RATES), *RATES]
    measured = [trial.figures for trial in tuning.searched if trial.figures]
    return next(
        ((latency, rate) for latency in latencies for rate in rates if any(_has(f, latency, rate) for f in measured)),
        None,
    )


def _has(figures: Figures | None, latency: str, rate: str) -> bool:
    return figures is not None and figures.get(latency, 0.0) > 0.0 and rate in figures


def pareto_front(trials: Sequence[Trial], latency: str, rate: str) -> list[tuple[float, float]]:
    """Return the points that no other beats in both figures, by latency."""
    front: list[tuple[float, float]] = []
    for x, y in sorted((_figure(trial, latency), -_figure(trial, rate)) for trial in trials):
        if not front or -y > front[-1][1]:
            front.append((x, -y))
    return front


def _figure(trial: Trial, name: str) -> float:
    assert trial.figures is not None, "trials without figures are left out"
    return trial.figures[name]


def _pareto(tuning: Tuning, trials: Sequence[Trial], latency: str, rate: str, title: str) -> str:
    goal, space, verdict = tuning.plan.goal, tuning.space, tuning.verdict
    groups: dict[str, tuple[str, list[Trial]]] = {
        "misses a constraint": (_GREY, []),
        "meets every constraint": (_BLUE, []),
        "default settings": (_RED, []),
        "to use": (_GREEN, []),
    }
    for trial in trials:
        if trial.point == verdict.chosen:
            label = "to use"
        elif space.is_default(trial.point):
            label = "default settings"
        else:
            label = "meets every constraint" if goal.is_met(trial.figures) else "misses a constraint"
        groups[label][1].append(trial)
    drawn = [
        Points(
            label,
            color,
            [_figure(trial, latency) for trial in members],
            [_figure(trial, rate) for trial in members],
            [_text(trial, latency, rate) for trial in members],
            radius=6.0 if label == "to use" else 3.5,
        )
        for label, (color, members) in groups.items()
        if members
    ]
    front = pareto_front(trials, latency, rate)
    line = Line("front", _BLUE, [x for x, _ in front], [y for _, y in front])
    return point_plot(title, drawn, line, "ms")


def _text(trial: Trial, latency: str, rate: str) -> str:
    figures = ", ".join(f"{name} {format_figure(name, _figure(trial, name))}" for name in (rate, latency))
    return f"{describe(trial.point)}: {figures}"
