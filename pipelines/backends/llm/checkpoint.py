"""Finds the checkpoint of a model folder: in its version, or where its parameters point."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ErrorCode, SluiceError, invalid
from pipelines.backends.base import ModelSource
from pipelines.text.tokenizer import TOKENIZER_FILES

VLLM_FILE = "model.json"
"""Where Triton's vLLM backend has its engine's arguments."""

_POINTERS = ("gpt_model_path", "engine_dir", "model", "tokenizer_dir")
"""Parameters that name a folder, in the order in which they are tried."""
_TOKENIZER_POINTERS = ("tokenizer_dir", "tokenizer")
_IR_FILE = "openvino_model.xml"
_WEIGHTS = ("*.safetensors", "*.bin")
_ENGINE_FILES = ("*.engine", "*.plan")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A HuggingFace checkpoint or OpenVINO IR, and where its tokenizer is."""

    path: Path
    tokenizer: Path


def find_checkpoint(source: ModelSource, texts: Mapping[str, str]) -> CheckpointFolder:
    """The version's own, else that of the first parameter (`texts`) that names one.

    Raises SluiceError NOT_FOUND with what was found instead and what to put there.
    """
    path = next((folder for folder in _candidates(source, texts) if is_checkpoint(folder)), None)
    if path is None:
        raise _not_found(source, texts)
    tokenizers = (_resolved(source, texts[key]) for key in _TOKENIZER_POINTERS if key in texts)
    elsewhere = next((folder for folder in tokenizers if _has_tokenizer(folder)), None)
    return CheckpointFolder(path, path if _has_tokenizer(path) or elsewhere is None else elsewhere)


def is_checkpoint(folder: Path) -> bool:
    """Whether it holds what the engine can load. TensorRT-LLM's engines have a config.json too, without weights."""
    if not (folder / "config.json").is_file():
        return False
    return (folder / _IR_FILE).is_file() or any(any(folder.glob(pattern)) for pattern in _WEIGHTS)


def vllm_arguments(version_folder: Path) -> dict[str, str]:
    """The engine arguments of a `model.json`, as parameters; none where there is no such file.

    Raises SluiceError INVALID for a file that is no JSON object.
    """
    path = version_folder / VLLM_FILE
    if not path.is_file():
        return {}
    try:
        arguments = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise invalid(VLLM_FILE, f"cannot read {path}: {error}") from None
    return {key: _text(value) for key, value in arguments.items() if value is not None and value != ""}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _candidates(source: ModelSource, texts: Mapping[str, str]) -> Iterator[Path]:
    yield source.version_folder
    for key in _POINTERS:
        if key in texts:
            yield _resolved(source, texts[key])


def _resolved(source: ModelSource, text: str) -> Path:
    """A relative path is one inside the model's folder."""
    return source.folder / Path(text).expanduser()


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _not_found(source: ModelSource, texts: Mapping[str, str]) -> SluiceError:
    tried = [str(folder) for folder in _candidates(source, texts)]
    engine = next((file for folder in _candidates(source, texts) for file in _engine_files(folder)), None)
    found = f"model '{source.name}' has no checkpoint in {' or '.join(tried)}"
    if engine is not None:
        found = f"'{engine}' is a compiled TensorRT-LLM engine, which runs only on the GPU that it was compiled for"
    remedy = (
        f"put the HuggingFace checkpoint (config.json, *.safetensors, tokenizer.json) or OpenVINO IR of the model into "
        f"{source.version_folder}, or name its folder in parameter gpt_model_path of config.pbtxt"
    )
    return SluiceError(ErrorCode.NOT_FOUND, f"{found}; {remedy}")


def _engine_files(folder: Path) -> Iterator[Path]:
    for pattern in _ENGINE_FILES:
        yield from sorted(folder.glob(pattern))
