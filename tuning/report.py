"""The result of a tuning: a table for people, JSON for programs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from sluice.load.compare import Comparison
from sluice.load.run import read_machine_info
from sluice.tuning.comparison import best_trials
from sluice.tuning.figures import Figures, format_figure
from sluice.tuning.run import Tuning
from sluice.tuning.scaling import SimulationGap, gap_names, read_scale, simulation_gaps
from sluice.tuning.space import Point, Value, describe
from sluice.tuning.trials import Stage, Trial

_MOST_ROWS = 8
_MOST_FIGURES = 7


def print_report(tuning: Tuning, console: Console) -> None:
    """Print the best trials, the comparison with the default settings, and what to use."""
    console.print(title_of(tuning), style="bold", markup=False, highlight=False)
    console.print(_table(tuning))
    gaps = gap_rows(tuning)
    if gaps:
        console.print(f"\n{GAPS_TITLE}", highlight=False)
        console.print(_aligned_table(GAP_HEADER, gaps))
    if tuning.verdict.comparisons:
        heading = f"\n{len(tuning.rounds)} rounds in turns, A with the default settings, B with what was found"
        console.print(heading, highlight=False)
        console.print(_aligned_table(COMPARISON_HEADER, map(comparison_cells, tuning.verdict.comparisons)))
    console.print("")
    for line in verdict_lines(tuning):
        console.print(line, markup=False, highlight=False)


def title_of(tuning: Tuning) -> str:
    """Say in a line what was tuned, and for what."""
    goal = tuning.plan.goal
    limits = f" with {', '.join(map(str, goal.constraints))}" if goal.constraints else ""
    most = "most" if goal.objective.is_maximized else "least"
    return f"{tuning.plan.subject.title}: {most} {goal.objective.figure}{limits}"


def verdict_lines(tuning: Tuning) -> list[str]:
    """Say what to use, and why."""
    verdict, space = tuning.verdict, tuning.space
    load = f"{space.load.name} {verdict.chosen[space.load.name]}"
    if verdict.is_found_better:
        lines = [f"use      {describe(space.changed(verdict.found))}, at {load}"]
    else:
        lines = [f"use      the default settings, at {load}"]
    lines.append(f"because  {verdict.reason}")
    if verdict.missed:
        lines.append(f"but      the default settings miss {', '.join(verdict.missed)}: lower the load, or loosen it")
    return lines


def shown_trials(tuning: Tuning) -> list[tuple[str, Trial]]:
    """Return the trials to show, with what each is: the default settings at their best, and the best of each kind."""
    goal, space = tuning.plan.goal, tuning.space
    rows: list[tuple[str, Trial]] = []
    for stage in tuning.shown_stages:
        trials = list(tuning.store.of(stage))
        best = best_trials(trials, goal, space, len(trials))
        best.sort(key=lambda trial: goal.objective.sort_key(trial.figures or {}))
        rows += [(stage.value, trial) for trial in best[: _MOST_ROWS // (1 if tuning.plan.is_live else 2)]]
    shown = {trial.number for _, trial in rows}
    for stage in tuning.shown_stages:
        default = tuning.store.find(stage, tuning.verdict.default)
        if default is not None and default.number not in shown:
            rows.append((stage.value, default))
    return rows


def shown_names(tuning: Tuning) -> list[str]:
    """Return the figures to show: those of the goal, then usual ones that were measured."""
    measured: set[str] = set()
    for trial in tuning.store.trials:
        measured |= (trial.figures or {}).keys()
    usual = ("p99_ttft", "p99_itl", "p99_e2e", "memory", "mean_batch", "mean_queue")
    rate = "tokens_per_s" if "tokens_per_s" in measured else "requests_per_s"
    names = dict.fromkeys((*tuning.plan.goal.shown_figures, rate, *(name for name in usual if name in measured)))
    return list(names)[:_MOST_FIGURES]


def row_of(tuning: Tuning, kind: str, trial: Trial, names: Sequence[str]) -> list[str]:
    """Return the cells of a trial: kind, load, figures, whether it meets the constraints, settings."""
    space = tuning.space
    settings = describe(space.changed(trial.point)) if space.changed(trial.point) else "defaults"
    figures: Figures = trial.figures or {}
    is_met = "yes" if tuning.plan.goal.is_met(trial.figures) else "no"
    cells = [format_figure(name, figures.get(name)) for name in names]
    return [kind, str(trial.point[space.load.name]), *cells, is_met, settings]


def header_of(tuning: Tuning, names: Sequence[str]) -> list[str]:
    """Return the heads of the columns of `row_of`."""
    return ["trial", tuning.space.load.name, *names, "in bounds", "settings"]


def _table(tuning: Tuning) -> Table:
    names = shown_names(tuning)
    table = Table(box=None, pad_edge=False, header_style="bold")
    header = header_of(tuning, names)
    for place, name in enumerate(header):
        is_last = place == len(header) - 1
        table.add_column(
            name, justify="right" if place > 0 and not is_last else "left", no_wrap=not is_last, overflow="fold"
        )
    for kind, trial in shown_trials(tuning):
        table.add_row(*row_of(tuning, kind, trial, names))
    return table


def comparison_cells(compared: Comparison) -> list[str]:
    """Return the cells of a comparison."""
    figures = [format_figure(compared.name, value) for value in (compared.a, compared.b)]
    interval = f"{compared.interval.low:.3f} to {compared.interval.high:.3f}"
    return [compared.name, *figures, f"{compared.ratio:.3f}", interval, compared.verdict]


COMPARISON_HEADER = ("", "A", "B", "B / A", "95 % sure", "")


GAPS_TITLE = (
    "how far servers lie from the simulator: measured / simulated figures, the median of points (least to most)"
)
GAP_HEADER = ("", "calibrated costs", "points", "scaled costs", "points")


def gap_rows(tuning: Tuning) -> list[list[str]]:
    """Return the cells of the distances between simulator and servers, a row for each figure."""
    names = gap_names(tuning.plan.goal)
    before, after = (
        {gap.figure: gap for gap in simulation_gaps(tuning.store, stage, names)}
        for stage in (Stage.SIMULATED, Stage.SCALED)
    )
    return [[name, *_gap_cells(before[name]), *_gap_cells(after.get(name))] for name in names if name in before]


def _gap_cells(gap: SimulationGap | None) -> list[str]:
    return ["-", "-"] if gap is None else [str(gap), str(gap.num_points)]


def _aligned_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first and last columns are words."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < place < len(header) - 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _simulation_document(tuning: Tuning) -> dict[str, Any] | None:
    """Return how far the simulator lies from servers, and the factors of its costs; None without points in both."""
    stages = {"calibrated": Stage.SIMULATED, "scaled": Stage.SCALED}
    names = gap_names(tuning.plan.goal)
    gaps = {
        costs: [gap._asdict() for gap in simulation_gaps(tuning.store, stage, names)] for costs, stage in stages.items()
    }
    scale = read_scale(tuning.plan.folder)
    return {"factors": [] if scale is None else scale.factors, **gaps} if gaps["calibrated"] else None


def result_document(tuning: Tuning, command: str) -> dict[str, Any]:
    """Return everything that was found, for JSON."""
    verdict, space = tuning.verdict, tuning.space

    def settings(point: Point) -> dict[str, Value]:
        return space.settings_of(point)

    return {
        "tool": "sluice tune",
        "command": command,
        "machine": read_machine_info(),
        "objective": tuning.plan.goal.objective.figure,
        "constraints": [str(each) for each in tuning.plan.goal.constraints],
        "use": {
            "settings": settings(verdict.chosen),
            "changed": space.changed(verdict.chosen),
            space.load.name: verdict.chosen[space.load.name],
        },
        "is_better_than_default": verdict.is_found_better,
        "reason": verdict.reason,
        "missed": verdict.missed,
        "found": verdict.found,
        "default": verdict.default,
        "comparisons": [{**each._asdict(), "verdict": each.verdict} for each in verdict.comparisons],
        "simulation": _simulation_document(tuning),
        "space": [asdict(each) for each in space.dimensions],
        "num_trials": {stage.value: len(list(tuning.store.of(stage))) for stage in Stage},
    }
