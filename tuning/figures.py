"""The figures of a trial, and what a user wants of them: the objective and the constraints."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from sluice.engine.simulation.fleet import FleetRun
from sluice.load.config import Slo
from sluice.load.run import Run
from sluice.load.summary import Distribution
from sluice.tuning.errors import TuneError

Figures = dict[str, float]
"""Figures of a trial by name: milliseconds, bytes, or a number a second."""

LATENCIES = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("p50", "p90", "p95", "p99", "mean", "max")
RATES = {"tokens_per_s": "tokens/s", "requests_per_s": "requests/s", "goodput": "requests/s within --slo"}
SIZES = ("memory", "gpu_memory")
LATENCY_NAMES = tuple(f"{statistic}_{latency}" for latency in LATENCIES for statistic in STATISTICS)
NAMES = (*LATENCY_NAMES, *RATES, *SIZES)

_TIMES_INSIDE = ("mean_queue", "mean_compute")
"""Ends of the names of figures that a server tells of its own, in milliseconds."""
_CONSTRAINT = re.compile(r"\s*(\w+)\s*(<=|>=)\s*([\d.]+)\s*([A-Za-z]*)\s*")
_TIME_UNITS = {"": 1.0, "ms": 1.0, "s": 1e3}
_SIZE_UNITS = {"": 1.0} | {
    f"{unit}{end}": float(1 << 10 * power) for power, unit in enumerate("KMGT", start=1) for end in ("", "B", "iB")
}
_HOPELESS = 1e6
"""The violation of a trial without figures, beyond that of any that has them."""


def is_latency(name: str) -> bool:
    """Return whether a figure is in milliseconds."""
    return name in LATENCY_NAMES


def format_figure(name: str, value: float | None) -> str:
    """Format a figure with its unit."""
    if value is None:
        return "-"
    if name in SIZES:
        return f"{value / (1 << 20):,.0f} MiB"
    if is_latency(name) or name.endswith(_TIMES_INSIDE):
        return f"{value:,.1f} ms" if value < 1000 else f"{value / 1e3:,.2f} s"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Objective:
    """The figure to make as good as possible: rates large, latencies and memory small."""

    figure: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the name of a figure. Raises TuneError."""
        _check_name(text, text)
        return cls(text)

    @property
    def is_maximized(self) -> bool:
        return self.figure in RATES

    def is_better(self, a: float, b: float) -> bool:
        """Return whether `a` is better than `b`."""
        return a > b if self.is_maximized else a < b

    def sort_key(self, figures: Figures) -> float:
        """Return a key that sorts the best figures first."""
        value = figures[self.figure]
        return -value if self.is_maximized else value


@dataclass(frozen=True, slots=True)
class FigureConstraint:
    """A bound that a figure must keep to."""

    figure: str
    is_upper: bool
    bound: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `p99_ttft<=500`, `memory<=4G` or `requests_per_s>=20`. Raises TuneError."""
        match = _CONSTRAINT.fullmatch(text)
        if match is None:
            raise TuneError(f"{text!r}: write a constraint as FIGURE<=NUMBER or FIGURE>=NUMBER, e.g. 'p99_ttft<=500'")
        name, relation, number, unit = match.groups()
        _check_name(name, text)
        try:
            bound = float(number) * _units(name)[unit]
        except (KeyError, ValueError):
            units = ", ".join(unit for unit in _units(name) if unit)
            known = f"; units: {units}" if units else ""
            raise TuneError(f"{text!r}: {number}{unit} is no value of {name}{known}") from None
        return cls(name, relation == "<=", bound, f"{name}{relation}{number}{unit}")

    def violation(self, figures: Figures) -> float | None:
        """Return by how much the bound is missed, relative to it; 0 or less where it is met. None: it has no such
        figure, as the simulator has none of memory."""
        value = figures.get(self.figure)
        if value is None:
            return None
        excess = value - self.bound if self.is_upper else self.bound - value
        return excess / max(abs(self.bound), 1e-9)

    def __str__(self) -> str:
        return self.text


def _units(name: str) -> Mapping[str, float]:
    if is_latency(name):
        return _TIME_UNITS
    return _SIZE_UNITS if name in SIZES else {"": 1.0}


def _check_name(name: str, text: str) -> None:
    if name not in NAMES:
        latencies = f"{{{','.join(STATISTICS)}}}_{{{','.join(LATENCIES)}}}"
        raise TuneError(f"{text!r}: there is no figure {name}; figures are {latencies}, {', '.join((*RATES, *SIZES))}")


@dataclass(frozen=True, slots=True)
class Goal:
    """The aim of a search: the best objective among the points that meet every constraint."""

    objective: Objective
    constraints: tuple[FigureConstraint, ...] = ()

    def violations(self, figures: Figures | None) -> dict[str, float]:
        """Return how far each constraint is missed, by its text. A trial without figures misses all."""
        if figures is None or self.objective.figure not in figures:
            return {"measured": _HOPELESS} | {str(each): _HOPELESS for each in self.constraints}
        found = {str(each): each.violation(figures) for each in self.constraints}
        return {"measured": 0.0} | {name: value for name, value in found.items() if value is not None}

    def is_met(self, figures: Figures | None) -> bool:
        """Return whether a trial has the objective and meets every constraint on the figures that it has."""
        return all(value <= 0.0 for value in self.violations(figures).values())

    def missed(self, figures: Figures) -> list[str]:
        """Return the constraints that are missed, each with the figure."""
        return [
            f"{each} ({format_figure(each.figure, figures.get(each.figure))})"
            for each in self.constraints
            if (each.violation(figures) or 0.0) > 0.0
        ]

    @property
    def shown_figures(self) -> tuple[str, ...]:
        """The figures of the objective and the constraints, each once."""
        return tuple(dict.fromkeys((self.objective.figure, *(each.figure for each in self.constraints))))


def figures_of_run(run: Run) -> Figures:
    """Return the figures of a measured run."""
    summary = run.summary
    found: Figures = {}
    for latency in LATENCIES:
        found |= _of_distribution(latency, getattr(summary, f"{latency}_ms"))
    found["requests_per_s"] = summary.requests_per_s
    if summary.output_tokens:
        found["tokens_per_s"] = summary.output_tokens_per_s
    if summary.goodput_per_s is not None:
        found["goodput"] = summary.goodput_per_s
    return found


def _of_distribution(latency: str, distribution: Distribution) -> Iterable[tuple[str, float]]:
    values = {statistic: getattr(distribution, statistic) for statistic in STATISTICS}
    return {f"{statistic}_{latency}": value for statistic, value in values.items() if value is not None}.items()


def figures_of_simulation(run: FleetRun, slo: Slo | None) -> Figures:
    """Return the figures of a simulated run, which has all but those of memory. A run that rejects has none."""
    if (run.replica < 0).any():
        return {}
    lengths = np.array([request.num_output for request in run.requests])
    found: Figures = {}
    for latency, values in (("ttft", run.ttft_s), ("tpot", run.tpot_s), ("e2e", run.e2e_s)):
        if values.size:
            found |= {f"{name}_{latency}": float(value) * 1e3 for name, value in _statistics(values)}
    if run.gaps.num_gaps:
        found |= {f"p{percent}_itl": run.gaps.quantile(percent / 100) * 1e3 for percent in (50, 90, 95, 99)}
        found |= {"mean_itl": run.gaps.mean_s * 1e3, "max_itl": run.gaps.longest_s * 1e3}
    seconds = max(run.end_s, 1e-9)
    found["requests_per_s"] = len(lengths) / seconds
    found["tokens_per_s"] = float(lengths.sum()) / seconds
    if slo is not None:
        found["goodput"] = _num_within(run, lengths, slo) / seconds
    return found


def _statistics(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Iterable[tuple[str, float]]:
    percentiles = np.percentile(values, (50, 90, 95, 99)).tolist()
    return zip(STATISTICS, (*percentiles, float(values.mean()), float(values.max())), strict=True)


def _num_within(run: FleetRun, lengths: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", slo: Slo) -> int:
    tpot_s = (run.e2e_s - run.ttft_s) / np.maximum(lengths - 1, 1)
    targets = ((slo.ttft_ms, run.ttft_s), (slo.itl_ms, run.itl_p99_s), (slo.tpot_ms, tpot_s), (slo.e2e_ms, run.e2e_s))
    is_met = np.ones(len(lengths), bool)
    for target_ms, seconds in targets:
        if target_ms is not None:
            is_met &= seconds * 1e3 <= target_ms
    return int(is_met.sum())
