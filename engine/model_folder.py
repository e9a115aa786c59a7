"""Tells what a model folder holds by its files."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from sluice.engine.config import EngineConfig, Task
from sluice.errors import ErrorCode, SluiceError, invalid

SENTENCE_TRANSFORMERS = "modules.json"
"""The file of sentence-transformers that lists the parts of a model of embeddings."""
_CLASSIFICATION = "ForSequenceClassification"
"""The end of the architectures that classify texts, and pairs of them, which a cross-encoder gives one class for."""
_IR_FILE = "openvino_model.xml"
_CONFIG_FILE = "config.json"
_ENGINE_KEYS = frozenset({"pretrained_config", "build_config"})


class ModelFormat(StrEnum):
    """The kinds of model folder that a runtime can serve."""

    HUGGINGFACE = "huggingface"
    OPENVINO_IR = "openvino_ir"
    TENSORRT_LLM_CHECKPOINT = "tensorrt_llm_checkpoint"
    TENSORRT_LLM_ENGINE = "tensorrt_llm_engine"

    @property
    def phrase(self) -> str:
        """The format in messages, with its article."""
        return _PHRASES[self]

    @property
    def has_own_config(self) -> bool:
        """Whether its config.json is not HuggingFace's, so that the model's tokenizer needs another folder."""
        return self in (ModelFormat.TENSORRT_LLM_CHECKPOINT, ModelFormat.TENSORRT_LLM_ENGINE)


_PHRASES = {
    ModelFormat.HUGGINGFACE: "a HuggingFace checkpoint",
    ModelFormat.OPENVINO_IR: "an OpenVINO IR",
    ModelFormat.TENSORRT_LLM_CHECKPOINT: "a checkpoint converted for TensorRT-LLM",
    ModelFormat.TENSORRT_LLM_ENGINE: "a compiled engine of TensorRT-LLM",
}


def served_task(config: EngineConfig) -> Task:
    """Return what the model of `config` is served for: what was asked for, or what the folder's files show."""
    folder = Path(config.model_path)
    if config.task is not Task.AUTO:
        return config.task
    if (folder / SENTENCE_TRANSFORMERS).is_file():
        return Task.EMBED
    architectures = _try_config(folder).get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return Task.SCORE if any(str(name).endswith(_CLASSIFICATION) for name in names) else Task.GENERATE


def find_checkpoint(folder: Path) -> Path | None:
    """Return `folder` if it has a config.json, else its highest version (as in Triton) that has one, else None."""
    numbered = folder.glob("[0-9]*/") if folder.is_dir() else ()
    versions = sorted((each for each in numbered if each.name.isdecimal()), key=lambda each: int(each.name))
    candidates = (folder, *reversed(versions))
    return next((each for each in candidates if (each / _CONFIG_FILE).is_file()), None)


def model_format(folder: Path) -> ModelFormat | None:
    """Return the format that the files of `folder` show, None where it holds no model. A compiled engine's config.json
    has `pretrained_config` and `build_config` beside rank0.engine; a converted checkpoint's is the former alone, beside
    rank0.safetensors (TensorRT-LLM's `_ModelFormatKind`)."""
    if (folder / _IR_FILE).is_file():
        return ModelFormat.OPENVINO_IR
    if not (folder / _CONFIG_FILE).is_file():
        return None
    config = _try_config(folder)
    if _has(folder, "*.engine") or config.keys() >= _ENGINE_KEYS:
        return ModelFormat.TENSORRT_LLM_ENGINE
    if "architecture" in config and "architectures" not in config and _has(folder, "rank*.safetensors"):
        return ModelFormat.TENSORRT_LLM_CHECKPOINT
    return ModelFormat.HUGGINGFACE


def _try_config(folder: Path) -> dict[str, Any]:
    """Return the fields of config.json; none where it cannot be read: loading the model says what is wrong with it."""
    try:
        return read_json(folder / _CONFIG_FILE)
    except (OSError, SluiceError):
        return {}


def _has(folder: Path, pattern: str) -> bool:
    return any(True for _ in folder.glob(pattern))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the model. Raises NOT_FOUND without the file, INVALID for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} does not exist", param="model_path") from error
    except (ValueError, RecursionError) as error:
        raise invalid("model_path", f"{path} is not a JSON object: {error}") from error
