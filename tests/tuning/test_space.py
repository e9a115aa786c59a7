"""The values of settings: how they are written, where a default stands among them, how the optimiser knows them."""

import pytest

from sluice.tuning.errors import TuneError
from sluice.tuning.space import Dimension, SearchSpace, Value, describe, parse_search, parse_values, with_default

SPACE = SearchSpace(
    (Dimension("seqs", (8, 16, 32), 16), Dimension("mode", ("a", "b"), "a")),
    Dimension("concurrency", (1, 4), 1),
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8,16", (8, 16)),
        ("8..64", (8, 16, 32, 64)),
        ("3..10", (3, 6, 10)),
        ("0.5..2", (0.5, 1.0, 2)),
        ("off,0,1000", ("off", 0, 1000)),
        ("none,int8,none", ("none", "int8")),
        ("none,8+16", ("none", "8+16")),
    ],
)
def test_values_are_written_as_a_list_or_as_a_range_that_doubles(text: str, values: tuple[Value, ...]) -> None:
    assert parse_values(text) == values
    assert parse_search(f"--x={text}") == ("x", values)


@pytest.mark.parametrize("text", ["", "1,,2", "8..4", "0..4", "a..b", "1e-9..1e9,2..3,1e-30..1e30"])
def test_what_are_no_values_is_refused(text: str) -> None:
    with pytest.raises(TuneError, match="write"):
        parse_values(text)


def test_the_default_stands_in_its_place() -> None:
    assert with_default((8, 32), 16) == (8, 16, 32)
    assert with_default((8, 32), 64) == (8, 32, 64)
    assert with_default((8, 32, "auto"), 64) == (8, 32, 64, "auto")
    assert with_default((0, 100), "off") == ("off", 0, 100)
    assert with_default((0, 100), "auto") == (0, 100, "auto")
    assert with_default((8, 8), 8) == (8,)


def test_a_point_is_what_its_encoding_means() -> None:
    points = list(SPACE.points())
    assert len(points) == SPACE.size == 12
    for point in points:
        encoded = SPACE.encode(point)
        assert isinstance(encoded["seqs"], int)
        assert isinstance(encoded["mode"], str)
        assert SPACE.decode(encoded) == point


def test_the_default_point_has_nothing_changed() -> None:
    point = SPACE.default_point(4)
    assert SPACE.is_default(point)
    assert SPACE.changed(point) == {}
    assert SPACE.changed(point | {"mode": "b"}) == {"mode": "b"}
    assert describe(point) == "seqs=16, mode=a, concurrency=4"
