"""Figures of benchmarks, with all their repeats: printed as a table and written as JSON."""

import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sluice.load.run import read_machine_info

ReportProgress = Callable[[str], None]
"""Prints a line about the progress of a benchmark."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a figure: `limit` or less where `is_ceiling`, else `limit` or more."""

    limit: float
    is_ceiling: bool = True

    def is_met_by(self, value: float) -> bool:
        return value <= self.limit if self.is_ceiling else value >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.is_ceiling else '>='} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity of one subject, with a sample for each repeat."""

    name: str
    subject: str
    unit: str
    samples: tuple[float, ...]
    target: Target | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


class BenchmarkError(Exception):
    """A measurement that cannot be reported. The message says why."""


def print_figures(figures: Sequence[Figure], console: Console) -> None:
    """Print a row for each figure: median, target, every repeat."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("figure", "left"), ("of", "left"), ("median", "right"), ("unit", "left")):
        table.add_column(column, justify="right" if justify == "right" else "left", no_wrap=True)
    for column in ("target", "repeats"):
        table.add_column(column, no_wrap=True)
    for figure in figures:
        repeats = " ".join(_number(sample) for sample in figure.samples)
        row = (figure.name, figure.subject, _number(figure.median), figure.unit, _verdict(figure), repeats)
        table.add_row(*row)
    console.print(table)


def _verdict(figure: Figure) -> str:
    if figure.target is None:
        return ""
    verdict = "[green]met[/green]" if figure.target.is_met_by(figure.median) else "[red]missed[/red]"
    return f"{figure.target} {verdict}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def write_figures(figures: Sequence[Figure], folder: Path, load_before: float) -> Path:
    """Write the figures with all that is needed to judge and repeat them. Returns the file, which is named by the time.

    `load_before` is the machine's load average of one minute, taken before the first measurement.
    """
    now = datetime.now(UTC)
    document: dict[str, Any] = {
        "measured_at": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": read_machine_info(),
        "load_average_before": load_before,
        "figures": [{"median": figure.median, **msgspec.to_builtins(figure)} for figure in figures],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{now:%Y%m%dT%H%M%SZ}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    return file


def _commit() -> str:
    """Return the measured commit, marked where the working tree differs from it."""
    git = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
