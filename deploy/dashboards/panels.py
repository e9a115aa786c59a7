"""The parts of a dashboard. `layout` gives them positions and numbers."""

from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """Units, by Grafana's names."""

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
    """The ways in which a panel draws its series."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"
    NAMES = "names"
    """The names of the series. Their values mean nothing."""
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL query with the name of its series. `legend` may contain {{labels}}."""

    promql: str
    legend: str = "{{instance}}"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A colour for values from `value` up. Below the first threshold a panel is green."""

    value: float
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `width` counts the 24 columns of a dashboard."""

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
    """Texts to show for values: (value, text, colour)."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard among the values of `label` in the series of `metric`."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. `uid` is its address, which must not change."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def warns(warning: float, critical: float) -> tuple[Threshold, ...]:
    return Threshold(warning, "orange"), Threshold(critical, "red")
