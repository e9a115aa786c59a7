"""The bundled retrieval models, served from a copy of their folders, alone or beside a test's own."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from serving.backend import BackendContext, ModelLookup
from serving.repository.repository import ModelRepository
from serving.repository.settings import ControlMode
from tests.paths import MODELS

ENCODERS = ("sentence_tokenizer", "sentence_encoder", "query_encoder")


def copy_models(root: Path, *names: str) -> Path:
    """Their folders, below `root`."""
    for name in names or ENCODERS:
        shutil.copytree(MODELS / name, root / name)
    return root


def write_config(root: Path, name: str, config: str) -> Path:
    """A model's folder with version 1."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return folder


@asynccontextmanager
async def serving(root: Path) -> AsyncGenerator[ModelRepository, None]:
    """Every model below `root`. Fails where one cannot be loaded."""
    repository = ModelRepository([root], ControlMode.NONE, context)
    failures = await repository.start()
    assert not failures, {name: failure.message for name, failure in failures.items()}
    try:
        yield repository
    finally:
        await repository.close()


def _no_engine(path: str) -> EngineConfig:
    raise AssertionError("no model here has an engine")


def _no_record(model: str, protocol: str) -> Any:
    raise AssertionError("no model here is measured")


def context(models: ModelLookup) -> BackendContext:
    return BackendContext(models)
