"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest

from tests.engine.fake_runner import EchoRunner


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "ahead"])
def looks_ahead(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Run steps one after the other, and once more with one step of lookahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoRunner, "looks_ahead", request.param)
        yield request.param
