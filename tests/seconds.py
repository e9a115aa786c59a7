"""Seconds that each file of tests takes, as recorded in tests/seconds.toml by `make test ARGS=--record-seconds`."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.paths import TESTS

FILE = TESTS / "seconds.toml"
WORTH_S = 1.0
"""A file that takes less is not recorded."""


def read_seconds() -> dict[Path, float]:
    """Return the seconds of the files that are recorded."""
    return {TESTS / name: seconds for name, seconds in tomllib.loads(FILE.read_text()).items()}


class Recorder:
    """A plugin that writes what the files of a run took; other files keep what they have, those that are gone go."""

    def __init__(self) -> None:
        self._taken: Counter[Path] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[TESTS.parent / report.location[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        known = {**read_seconds(), **self._taken}
        kept = {path.relative_to(TESTS): took for path, took in known.items() if path.exists() and took >= WORTH_S}
        comment = "".join(line for line in FILE.read_text().splitlines(True) if line[0] in "#\n")
        rows = (f'"{name}" = {took:.1f}\n' for name, took in sorted(kept.items()))
        FILE.write_text(comment + "".join(rows))
