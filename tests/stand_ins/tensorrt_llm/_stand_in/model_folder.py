"""What the LLM classes read of a model folder."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .settings import settings


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`build` are a compiled engine's limits."""

    path: Path
    vocab_size: int
    max_positions: int
    build: dict[str, Any] | None


def read_model_folder(path: Path, *, is_engine: bool) -> ModelFolder:
    """Raises what the real class raises as far as it is known: FileNotFoundError without config.json, ValueError for
    a compiled engine given to the class for PyTorch."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path}/config.json does not exist")
    told = json.loads((path / "config.json").read_text())
    has_engine = (path / "rank0.engine").is_file()
    if has_engine and not is_engine:
        raise ValueError(f"{path} holds a TensorRT engine, which the PyTorch backend cannot load")
    config = told.get("pretrained_config", told)
    text = config.get("text_config", config)
    positions = text.get("max_position_embeddings", 2048)
    return ModelFolder(path, text["vocab_size"], positions, told.get("build_config") if has_engine else None)


def load_as_told() -> None:
    """As slowly, or with the failure, that a fault asks for."""
    delay = settings().fault("load_slow")
    if delay is not None:
        time.sleep(float(delay or 1))
    if settings().claims("load_error"):
        raise RuntimeError(f"the model cannot be loaded: {settings().fault('load_error') or 'a fault was asked for'}")
