"""What a dashboard is made of. Positions and numbers are given when it is laid out."""

from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """Grafana's names of units."""

    SHORT = "short"
    COUNT = "none"
    SECONDS = "s"
    BYTES = "bytes"
    SHARE = "percentunit"
    WATTS = "watt"
    JOULES = "joule"
    PER_SECOND = "reqps"
    OPERATIONS = "ops"
    RATE = "cps"


class Draw(StrEnum):
    """How a panel shows its series."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"
    NAMES = "names"
    """What the series are called; their values say nothing."""
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its series are called. `legend` may hold {{labels}}."""

    promql: str
    legend: str = "{{instance}}"


@dataclass(frozen=True, slots=True)
class Threshold:
    """From `value` up the panel is `color`; below the first one it is green."""

    value: float
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `width` is of the 24 columns of a dashboard."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: Unit = Unit.SHORT
    draw: Draw = Draw.LINES
    width: int = 8
    thresholds: tuple[Threshold, ...] = ()
    max: float | None = None
    decimals: int | None = None
    words: tuple[tuple[str, str, str], ...] = ()
    """(value, text, colour): words that stand for values."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of `label` in the series of `metric`."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`uid` is its address, which never changes."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def warns(warning: float, critical: float) -> tuple[Threshold, ...]:
    return Threshold(warning, "orange"), Threshold(critical, "red")
