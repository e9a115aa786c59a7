"""Shares the time of `make fuzz` among the properties."""

import os

import pytest

from tests.fuzz.running import MINUTES, Share
from tests.paths import TESTS

_SHRINKING_S = 900
"""Longest time to look for the smallest example that fails, beyond the property's share."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not MINUTES:
        return
    properties = [item for item in items if item.path.is_relative_to(TESTS / "fuzz")]
    if not properties:
        return
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # noqa: TID251 - set by pytest-xdist
    Share.seconds = 60 * MINUTES * num_workers / len(properties)
    for item in properties:
        item.add_marker(pytest.mark.timeout(Share.seconds + _SHRINKING_S))
