"""The space that is searched: settings of a server, and the load that it is driven with."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sluice.tuning.errors import TuneError

Value = int | float | str
Point = dict[str, Value]
"""A value for each dimension, the load included."""
Encoded = dict[str, int | str]
"""A point as the optimiser knows it: the place of a value that has an order, else the value as text."""

OFF = "off"
_MOST_VALUES = 64


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting or the load, and the values to try, in an order where they have one. `default` is what a server has
    that is told nothing."""

    name: str
    values: tuple[Value, ...]
    default: Value

    @property
    def is_ordered(self) -> bool:
        """Return whether neighbouring values are alike: any is a number."""
        return any(not isinstance(value, str) for value in self.values)

    def replaced(self, values: Sequence[Value]) -> "Dimension":
        """Return the dimension with other values, and the default among them."""
        return replace(self, values=with_default(values, self.default))


def with_default(values: Sequence[Value], default: Value) -> tuple[Value, ...]:
    """Return the values with the default in its place: numbers by size, `off` first, other words last."""
    if default in values:
        return tuple(dict.fromkeys(values))
    if isinstance(default, str):
        return (default, *values) if default == OFF else (*values, default)
    place = next((n for n, each in enumerate(values) if not isinstance(each, str) and each > default), None)
    if place is None:
        place = len(values) - next((n for n, each in enumerate(reversed(values)) if not isinstance(each, str)), 0)
    return (*values[:place], default, *values[place:])


def _same(point: Point) -> Point:
    return point


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Settings and load. `repair` turns a point that no server can have into the nearest that one can."""

    settings: tuple[Dimension, ...]
    load: Dimension
    repair: Callable[[Point], Point] = field(default=_same, compare=False)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return (*self.settings, self.load)

    @property
    def size(self) -> int:
        """The number of points, those to be repaired included."""
        return math.prod(len(each.values) for each in self.dimensions)

    def points(self) -> Iterator[Point]:
        """Yield every point."""
        names = [each.name for each in self.dimensions]
        for values in itertools.product(*(each.values for each in self.dimensions)):
            yield self.repair(dict(zip(names, values, strict=True)))

    def default_point(self, load: Value) -> Point:
        """Return the point of a server that is told nothing."""
        return {each.name: each.default for each in self.settings} | {self.load.name: load}

    def is_default(self, point: Point) -> bool:
        """Return whether all settings of a point are the defaults, whatever its load."""
        return all(point[each.name] == each.default for each in self.settings)

    def settings_of(self, point: Point) -> Point:
        """Return a point without its load."""
        return {each.name: point[each.name] for each in self.settings}

    def changed(self, point: Point) -> Point:
        """Return the settings of a point that are not the default."""
        return {each.name: point[each.name] for each in self.settings if point[each.name] != each.default}

    def encode(self, point: Point) -> Encoded:
        """Return a point as the optimiser knows it."""
        return {
            each.name: each.values.index(point[each.name]) if each.is_ordered else str(point[each.name])
            for each in self.dimensions
        }

    def decode(self, encoded: Mapping[str, int | str]) -> Point:
        """Return the point, repaired, that the optimiser means."""
        return self.repair({each.name: _decoded(each, encoded[each.name]) for each in self.dimensions})


def _decoded(dimension: Dimension, encoded: int | str) -> Value:
    if isinstance(encoded, int):
        return dimension.values[encoded]
    return next(value for value in dimension.values if str(value) == encoded)


def describe(point: Point) -> str:
    """Format a point or its settings in a line."""
    texts = (f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in point.items())
    return ", ".join(texts) or "defaults"


def parse_values(text: str) -> tuple[Value, ...]:
    """Parse values: `8,16,32`, `8..64` for 8, 16, 32, 64, or words. Raises TuneError."""
    found: list[Value] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        found += _doubled(part, first, last) if dots else [_value(part.strip())]
    if "" in found or len(found) > _MOST_VALUES:
        raise TuneError(f"{text!r}: write values as 8,16,32 or as a range 8..64 that doubles, at most {_MOST_VALUES}")
    return tuple(dict.fromkeys(found))


def _doubled(part: str, first: str, last: str) -> list[Value]:
    low, high = _value(first.strip()), _value(last.strip())
    if isinstance(low, str) or isinstance(high, str) or not 0 < low <= high:
        raise TuneError(f"{part!r}: write a range as LOW..HIGH, two numbers above 0; it doubles from LOW to HIGH")
    found: list[Value] = []
    while low < high:
        found.append(low)
        low *= 2
    return [*found, high]


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def parse_search(text: str) -> tuple[str, tuple[Value, ...]]:
    """Parse `NAME=VALUES`. Raises TuneError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip():
        raise TuneError(f"{text!r}: write what to search as NAME=VALUES, e.g. max-num-seqs=8,16,32")
    return name.strip().removeprefix("--"), parse_values(values)
