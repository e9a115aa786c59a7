import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from sluice.serving.model import Model


@pytest.fixture
async def loaded() -> AsyncIterator[list[Model]]:
    """Models to close at the end of the test."""
    models: list[Model] = []
    yield models
    for model in models:
        await model.close()


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
