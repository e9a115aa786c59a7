"""The bundled retrieval models, served from a copy of their folders, alone or beside a test's own."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from sluice.serving.backend import BackendContext, ModelLookup
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from tests.paths import MODELS

ENCODERS = ("sentence_tokenizer", "sentence_encoder", "query_encoder")


def copy_models(root: Path, *names: str) -> Path:
    """Copy the models' folders below `root`, by default those of the encoders."""
    for name in names or ENCODERS:
        shutil.copytree(MODELS / name, root / name)
    return root


def write_config(root: Path, name: str, config: str) -> Path:
    """Write a model's folder with an empty version 1."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return folder


@asynccontextmanager
async def serving(root: Path) -> AsyncGenerator[ModelRepository, None]:
    """Serve every model below `root`. Fails if one cannot be loaded."""
    repository = ModelRepository([root], ControlMode.NONE, context)
    failures = await repository.start()
    assert not failures, {name: failure.message for name, failure in failures.items()}
    try:
        yield repository
    finally:
        await repository.close()


def context(models: ModelLookup) -> BackendContext:
    return BackendContext(models)
