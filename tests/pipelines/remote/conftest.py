from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.serving.model import Model
from tests.pipelines.llm.calls import Record
from tests.pipelines.remote.models import Load, load_model
from tests.pipelines.remote.remote_api import RemoteApi, remote_api


@pytest.fixture
async def api() -> AsyncIterator[RemoteApi]:
    async with remote_api() as running:
        yield running


@pytest.fixture
def records() -> list[Record]:
    return []


@pytest.fixture
async def load(api: RemoteApi, tmp_path: Path, records: list[Record]) -> AsyncIterator[Load]:
    """Loads models that the test's API serves, unless `base_url` is given."""
    models: list[Model] = []

    async def load_one(text: str = "", **parameters: object) -> Model:
        models.append(await load_model(tmp_path, text, {"base_url": api.url, **parameters}, records))
        return models[-1]

    yield load_one
    for model in models:
        await model.close()
