from collections.abc import AsyncIterator

import pytest

from sluice.serving.model import Model


@pytest.fixture
async def loaded() -> AsyncIterator[list[Model]]:
    """Models to close at the end of the test."""
    models: list[Model] = []
    yield models
    for model in models:
        await model.close()
