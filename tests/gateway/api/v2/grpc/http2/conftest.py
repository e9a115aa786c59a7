"""These tests know the inside of Sluice's own server, and run on that one alone."""

import pytest


@pytest.fixture(autouse=True)
def server_name() -> str:
    return "sluice"
