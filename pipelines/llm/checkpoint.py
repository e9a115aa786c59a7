"""Finds the checkpoint of a model folder: in its version, or where its parameters point."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.config import Runtime
from engine.model_folder import ModelFormat, model_format
from engine.runtimes import RUNTIMES
from pipelines.text.tokenizer import TOKENIZER_FILES
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError, invalid

_TENSORRT_LLM = RUNTIMES[Runtime.TENSORRT_LLM]
VLLM_FILE = "model.json"
"""Where Triton's vLLM backend has its engine's arguments."""

_POINTERS = ("gpt_model_path", "engine_dir", "model", "tokenizer_dir")
"""Parameters that name a folder, in the order in which they are tried."""
_TOKENIZER_POINTERS = ("tokenizer_dir", "tokenizer")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = ("*.safetensors", "*.bin")
_ENGINE_FILES = ("*.engine", "*.plan")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A model that some runtime here can load, and where its tokenizer is."""

    path: Path
    tokenizer: Path


def find_checkpoint(
    source: ModelSource, texts: Mapping[str, str], engine_python: str | None = None
) -> CheckpointFolder:
    """The version's own, else that of the first parameter (`texts`) that names one.

    `engine_python` is the engine's, where that has one of its own.
    Raises SluiceError NOT_FOUND with what was found instead and what to put there.
    """
    has_library = partial(_TENSORRT_LLM.is_installed, engine_python)
    path = next((folder for folder in _candidates(source, texts) if is_checkpoint(folder, has_library)), None)
    if path is None:
        raise _not_found(source, texts, has_library)
    tokenizers = (_resolved(source, texts[key]) for key in _TOKENIZER_POINTERS if key in texts)
    elsewhere = next((folder for folder in tokenizers if _has_tokenizer(folder)), None)
    return CheckpointFolder(path, path if _has_tokenizer(path) or elsewhere is None else elsewhere)


def is_checkpoint(folder: Path, has_library: Callable[[], bool] = _TENSORRT_LLM.is_installed) -> bool:
    """Whether it holds what a runtime can load; `has_library` says whether TensorRT-LLM is there.

    TensorRT-LLM's engines have a config.json too, without weights, and its converted checkpoints weights of their own.
    """
    if not (folder / "config.json").is_file():
        return False
    match model_format(folder):
        case ModelFormat.TENSORRT_LLM_ENGINE | ModelFormat.TENSORRT_LLM_CHECKPOINT:
            return has_library()
        case ModelFormat.OPENVINO_IR:
            return True
    return any(any(folder.glob(pattern)) for pattern in _WEIGHTS)


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
    return {key: text_of(value) for key, value in arguments.items() if value is not None and value != ""}


def text_of(value: Any) -> str:
    """A value of a file as config.pbtxt would have it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _candidates(source: ModelSource, texts: Mapping[str, str]) -> Iterator[Path]:
    yield source.version_folder
    for key in _POINTERS:
        if key in texts:
            yield _resolved(source, texts[key])


def _resolved(source: ModelSource, text: str) -> Path:
    """A relative path is one inside the model's folder."""
    return source.folder / Path(text).expanduser()


def resolved(source: ModelSource, text: str) -> str:
    """A path as a process elsewhere can open it; what is none stays as it is."""
    path = _resolved(source, text)
    return str(path) if path.exists() else text


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _not_found(source: ModelSource, texts: Mapping[str, str], has_library: Callable[[], bool]) -> SluiceError:
    remedy = (
        f"put the HuggingFace checkpoint (config.json, *.safetensors, tokenizer.json) or OpenVINO IR of the model into "
        f"{source.version_folder}, or name its folder in parameter gpt_model_path of config.pbtxt"
    )
    return SluiceError(ErrorCode.NOT_FOUND, f"{_found_instead(source, texts, has_library)}; {remedy}")


def _found_instead(source: ModelSource, texts: Mapping[str, str], has_library: Callable[[], bool]) -> str:
    folders = list(_candidates(source, texts))
    for folder in folders:
        for engine in _engine_files(folder):
            return f"'{engine}' is a compiled TensorRT-LLM engine, {_why_no_engine(has_library)}"
        if model_format(folder) is ModelFormat.TENSORRT_LLM_CHECKPOINT:
            return f"'{folder}' is a checkpoint converted for TensorRT-LLM, which is not installed here"
    found = f"model '{source.name}' has no checkpoint in {' or '.join(map(str, folders))}"
    names = [texts[key] for key in _POINTERS if _HUB_NAME.fullmatch(texts.get(key, ""))]
    if names:
        found += f"; '{names[0]}' reads like a name on the Hugging Face hub: `hf download {names[0]}` says its folder"
    return found


def _why_no_engine(has_library: Callable[[], bool]) -> str:
    if not has_library():
        return "which runs only on the GPU that it was compiled for, by TensorRT-LLM, which is not installed here"
    return "which needs the config.json that it was built with beside it"


def _engine_files(folder: Path) -> Iterator[Path]:
    for pattern in _ENGINE_FILES:
        yield from sorted(folder.glob(pattern))
