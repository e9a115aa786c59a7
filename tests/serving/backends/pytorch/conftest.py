from collections.abc import AsyncIterator

import pytest

from serving.model import Model


@pytest.fixture
async def loaded() -> AsyncIterator[list[Model]]:
    """What to close in the end."""
    models: list[Model] = []
    yield models
    for model in models:
        await model.close()
