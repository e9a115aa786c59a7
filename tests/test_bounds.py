"""The code keeps within tests/bounds.toml, and that file only tightens."""

import ast
import subprocess
from itertools import pairwise
from textwrap import indent

import pytest

from tests.paths import ROOT
from tests.tools.bounds import FILE, PATHS, Bound, loosened, measure, num_time_bars, read_bounds

VERSIONS = 40
"""How many of the file's last versions are compared."""


def test_no_measure_is_above_its_bound() -> None:
    bounds = {name: bound for name, bound in read_bounds(FILE.read_text()).items() if not name.startswith(f"{PATHS}.")}
    measures = measure()
    assert bounds.keys() == measures.keys()
    over = {name: (measured, bounds[name].most) for name, measured in measures.items() if measured > bounds[name].most}
    assert not over, f"measured, and at most: {over}; make it smaller, or name the issue that allows more"


def test_no_bound_was_raised_without_an_issue() -> None:
    versions = [read_bounds(FILE.read_text()), *map(read_bounds, _committed())]
    for after, before in pairwise(versions):
        assert not loosened(before, after)


def _committed() -> list[str]:
    """Return the file's last committed versions, newest first. Skips where the repository's history is not here."""
    name = str(FILE.relative_to(ROOT))
    try:
        log = _git("log", f"-{VERSIONS}", "--first-parent", "--format=%H", "--", name)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no git, or this is no clone: a bound cannot be compared with the one before")
    return [_git("show", f"{commit}:{name}") for commit in log.split()]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        ({"path.chat": Bound(71)}, []),
        ({"path.chat": Bound(73, issue=36)}, []),
        ({"path.chat": Bound(73, issue=12)}, ["path.chat rose from 72 to 73: name another issue, which allows it"]),
        ({}, ["path.chat is gone"]),
    ],
)
def test_a_bound_falls_freely_and_rises_with_an_issue(after: dict[str, Bound], wrong: list[str]) -> None:
    assert loosened({"path.chat": Bound(72, issue=12)}, after) == wrong


@pytest.mark.parametrize(
    ("claims", "num"),
    [
        ("began = monotonic()\nassert time.monotonic() - began < 2", 1),
        ("spent = process_time() - 1\nlongest = max(0, spent)\nassert 0.2 > longest", 1),
        ("waits.append(loop.time())\nassert 0 <= min(waits) < 0.9", 1),
        ("began = monotonic()\nassert monotonic() - began >= 2", 0),
        ("until = monotonic() + 90\nwhile not ready():\n    assert monotonic() < until", 0),
        ("assert clock.now < 5", 0),
    ],
)
def test_an_assertion_that_time_is_short_is_counted(claims: str, num: int) -> None:
    assert num_time_bars(ast.parse(f"if True:\n{indent(claims, '    ')}").body[0]) == num
