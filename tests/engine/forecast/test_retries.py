"""Clients that a full queue refuses and that come back when they were told to, in simulated time."""

from functools import cache

import pytest

from benchmarks.predicted_wait.engines import VirtualEngine
from benchmarks.predicted_wait.retries import PHASES, Result, run_phases

pytestmark = pytest.mark.slow

NAMES = [phase.name for phase in PHASES]


@cache
def results() -> dict[str, Result]:
    return dict(zip(NAMES, run_phases(VirtualEngine(), 1), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_who_comes_back_when_told_finds_a_place(name: str) -> None:
    assert results()[name].first_retry >= 90.0


@pytest.mark.parametrize("name", NAMES)
def test_waits_are_predicted_for_each_kind_of_load_after_another(name: str) -> None:
    target = next(phase.target for phase in PHASES if phase.name == name)
    assert results()[name].error <= target.limit


def test_in_a_burst_the_last_are_told_about_how_long_all_take() -> None:
    """Those that it refuses come back one after another, and the engine does not wait for them."""
    for name in NAMES:
        if name.startswith("burst"):
            assert 0.7 * results()[name].duration_s < results()[name].longest_told_s < results()[name].duration_s + 1.0
