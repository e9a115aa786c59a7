from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.serving.repository.repository import ModelRepository
from tests.serving.repository.parts import Bench


@pytest.fixture
def bench(root: Path) -> Bench:
    return Bench(root)


@pytest.fixture
async def repository(bench: Bench) -> AsyncIterator[ModelRepository]:
    """Explicit, started empty."""
    repository = bench.repository()
    await repository.start()
    yield repository
    await repository.close()
    assert not bench.stamp.open_models
