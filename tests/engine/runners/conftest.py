"""Copies of checkpoints that a test may damage."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.runners.goldens import checkpoint_path


class EditableCheckpoint:
    """A copy of a recorded checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def edit(self, name: str = "config.json", **fields: Any) -> None:
        """Set fields of a JSON file; None removes the field."""
        file = self.path / name
        values = {**msgspec.json.decode(file.read_bytes()), **fields}
        file.write_bytes(msgspec.json.encode({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> EditableCheckpoint:
    """llama_tiny: stored in bf16."""
    return EditableCheckpoint(shutil.copytree(checkpoint_path("llama_tiny"), tmp_path / "checkpoint"))


@pytest.fixture
def float_checkpoint(tmp_path: Path) -> EditableCheckpoint:
    """qwen3_tiny: stored in float32, which numpy can read and write."""
    return EditableCheckpoint(shutil.copytree(checkpoint_path("qwen3_tiny"), tmp_path / "checkpoint"))
