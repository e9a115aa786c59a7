from pathlib import Path

import pytest


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine count no GPU, like the one that the reference was recorded on."""
    monkeypatch.setattr("sluice.serving.config.completion.num_gpus", lambda: 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty model repository."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder
