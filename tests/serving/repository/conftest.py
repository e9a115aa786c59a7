from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serving.repository.repository import ModelRepository
from tests.serving.repository.parts import Bench


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine as one without a GPU, like the one that the reference was recorded on."""
    monkeypatch.setattr("serving.config.completion.num_gpus", lambda: 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


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
