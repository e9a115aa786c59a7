"""Reads the folder of an LLM: finds its checkpoint and tokenizer, and parses its files of arguments and adapters. The
files are NVIDIA's `model.yaml`, and `model.json` and `multi_lora.json` of Triton's vLLM backend."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sluice.engine.model_folder import ModelFormat, model_format
from sluice.engine.runtimes import is_loadable, runtimes_for
from sluice.engine.yaml_text import load_yaml
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.text.transformers_tokenizer import TOKENIZER_FILES
from sluice.serving.spec import ModelSource

VLLM_FILE = "model.json"
"""The engine arguments of Triton's vLLM backend, in the version's folder."""
MODEL_YAML = "model.yaml"
"""The arguments of NVIDIA's llmapi model, in the version's folder."""
LORA_FILE = "multi_lora.json"
"""The adapters of Triton's vLLM backend, in the version's folder."""

_TRITON_KEY = "triton_config"
_PARAMETER_ARGUMENTS = ("model", "tokenizer", "tensor_parallel_size", "pipeline_parallel_size")
"""Arguments that are taken as parameters: they say where files are and how many GPUs are used."""
_CANCELLATION_PERIOD = "cancellation_check_period_ms"
_MULTIMODAL = "multimodal"
_TRITON_ARGUMENTS = ("max_batch_size", "decoupled", _CANCELLATION_PERIOD, _MULTIMODAL)
_TRITON_SECTIONS: Mapping[str, str] = {
    "logits_post_processors": "no Python runs on logits here; a request that names a processor is refused",
}
"""Sections of NVIDIA's file, beside `triton_config`, that its own model.py reads, each with why it has no effect."""
_OLD_SECTIONS: Mapping[str, str] = {
    "pytorch_backend_config": (
        "TensorRT-LLM 1.0 and newer have its settings as arguments of their own: enable_overlap_scheduler is "
        "disable_overlap_scheduler, use_cuda_graph and cuda_graph_* are cuda_graph_config, kv_cache_dtype is "
        "kv_cache_config.dtype, moe_backend is moe_config.backend; all others have their names"
    ),
}
"""Arguments of TensorRT-LLM before 1.0, each with what stands for it now."""
_POINTERS = ("gpt_model_path", "engine_dir", "model", "tokenizer_dir")
"""Parameters that name the checkpoint's folder, in order of preference."""
_TOKENIZER_POINTERS = ("tokenizer_dir", "tokenizer")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = ("*.safetensors", "*.bin")
_ENGINE_FILES = ("*.engine", "*.plan")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder of a model that some runtime here can load, and the folder of its tokenizer."""

    path: Path
    tokenizer: Path


def find_checkpoint(
    source: ModelSource, texts: Mapping[str, str], engine_python: str | None = None
) -> CheckpointFolder:
    """Return the checkpoint in the version's folder, else in the folder of the first parameter in `texts` with one.
    `engine_python` is the engine's Python where that is not this one. Raises NOT_FOUND, which says what was found
    instead and what to put there."""
    path = next((folder for folder in _candidates(source, texts) if _is_checkpoint(folder, engine_python)), None)
    if path is None:
        raise _not_found(source, texts, engine_python)
    tokenizers = (_resolved(source, texts[key]) for key in _TOKENIZER_POINTERS if key in texts)
    elsewhere = next((folder for folder in tokenizers if _has_tokenizer(folder)), None)
    return CheckpointFolder(path, path if _has_tokenizer(path) or elsewhere is None else elsewhere)


def _is_checkpoint(folder: Path, engine_python: str | None) -> bool:
    """Whether an installed runtime can load the folder."""
    if not (folder / "config.json").is_file():
        return False
    found = model_format(folder)
    if found is ModelFormat.HUGGINGFACE and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return False
    return is_loadable(found, engine_python)


def resolve_path(source: ModelSource, text: str) -> str:
    """Return a path in a form that another process can open. Text that is not a path is returned unchanged."""
    path = _resolved(source, text)
    return str(path) if path.exists() else text


def _candidates(source: ModelSource, texts: Mapping[str, str]) -> Iterator[Path]:
    yield source.version_folder
    for key in _POINTERS:
        if key in texts:
            yield _resolved(source, texts[key])


def _resolved(source: ModelSource, text: str) -> Path:
    """Return the path. A relative one starts from the model's folder."""
    return source.folder / Path(text).expanduser()


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _not_found(source: ModelSource, texts: Mapping[str, str], engine_python: str | None) -> SluiceError:
    remedy = (
        f"put the HuggingFace checkpoint (config.json, *.safetensors, tokenizer.json) or OpenVINO IR of the model into "
        f"{source.version_folder}, or name its folder in parameter gpt_model_path of config.pbtxt"
    )
    return SluiceError(ErrorCode.NOT_FOUND, f"{_found_instead(source, texts, engine_python)}; {remedy}")


def _found_instead(source: ModelSource, texts: Mapping[str, str], engine_python: str | None) -> str:
    folders = list(_candidates(source, texts))
    for folder in folders:
        engine = next((file for pattern in _ENGINE_FILES for file in sorted(folder.glob(pattern))), None)
        if engine is not None:
            return f"'{engine}' is a compiled TensorRT-LLM engine, {_why_no_engine(engine_python)}"
        kind = model_format(folder)
        if kind is not None and not is_loadable(kind, engine_python):
            titles = " or ".join(spec.title for spec in runtimes_for(kind))
            return f"'{folder}' is {kind.phrase}, and {titles} is not installed here"
    found = f"model '{source.name}' has no checkpoint in {' or '.join(map(str, folders))}"
    names = [texts[key] for key in _POINTERS if _HUB_NAME.fullmatch(texts.get(key, ""))]
    if names:
        found += f"; '{names[0]}' reads like a name on the Hugging Face hub: `hf download {names[0]}` says its folder"
    return found


def _why_no_engine(engine_python: str | None) -> str:
    if not is_loadable(ModelFormat.TENSORRT_LLM_ENGINE, engine_python):
        return "which runs only on the GPU that it was compiled for, by TensorRT-LLM, which is not installed here"
    return "which needs the config.json that it was built with beside it"


@dataclass(frozen=True, slots=True)
class ModelYaml:
    """The content of a `model.yaml`."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the LLM class."""
    texts: dict[str, str] = field(default_factory=dict)
    """Arguments that are taken as parameters of config.pbtxt."""
    decoupled: bool | None = None
    """None where the file does not say."""
    max_batch_size: int = 0
    notes: list[str] = field(default_factory=list)
    """Notes on what has no effect."""


def read_argument_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of arguments for TensorRT-LLM's LLM class, `model.yaml` or trtllm-serve's extra options. An
    empty file has no arguments. Raises ValueError, with line and column, for text that is not YAML, and for a document
    that is not a mapping of names to values that JSON has too."""
    import yaml  # slow to import, and few models have such a file

    try:
        found = load_yaml(path.read_text("utf-8"))
    except yaml.MarkedYAMLError as error:
        raise ValueError(_place(error.problem_mark) + str(error.problem or error.context or "it is no YAML")) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    if found is None:
        return {}
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Any])
    except (TypeError, ValueError, RecursionError):
        raise ValueError("it must be a mapping of arguments of TensorRT-LLM's LLM class, by name") from None


def _place(mark: Any) -> str:
    """Return the line and column of a YAML mark, which counts from 0, for an error message."""
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def read_model_yaml(version_folder: Path) -> ModelYaml:
    """Read the version's `model.yaml`, which may be missing. Raises SluiceError INVALID, naming the file and line."""
    path = version_folder / MODEL_YAML
    if not path.is_file():
        return ModelYaml()
    try:
        arguments = read_argument_file(path)
        triton = _triton_config(arguments.pop(_TRITON_KEY, None) or {})
        backend = arguments.get("backend")
        if backend not in (None, "pytorch", "tensorrt"):
            raise ValueError(f"backend must be pytorch or tensorrt, got {backend!r}")
        for key, reason in _OLD_SECTIONS.items():
            if arguments.get(key) is not None:
                raise ValueError(f"{key} is no argument: {reason}")
    except ValueError as error:
        raise invalid(MODEL_YAML, f"cannot take {path}: {error}") from None
    texts = {key: str(arguments.pop(key)) for key in _PARAMETER_ARGUMENTS if arguments.get(key) is not None}
    if _CANCELLATION_PERIOD in triton:
        texts[_CANCELLATION_PERIOD] = parameter_text(triton[_CANCELLATION_PERIOD])
    notes = [f"{MODEL_YAML}: {key}: {reason}" for key, reason in _TRITON_SECTIONS.items() if arguments.pop(key, None)]
    return ModelYaml(arguments, texts, triton.get("decoupled"), triton.get("max_batch_size", 0), notes)


def _triton_config(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{_TRITON_KEY} must be a mapping of {', '.join(_TRITON_ARGUMENTS)}")
    unknown = [key for key in given if key not in _TRITON_ARGUMENTS]
    if unknown:
        raise ValueError(f"{_TRITON_KEY} has no {unknown[0]!r}; there are {', '.join(_TRITON_ARGUMENTS)}")
    if not isinstance(given.get("decoupled", False), bool):
        raise ValueError(f"{_TRITON_KEY}.decoupled must be true or false, got {given['decoupled']!r}")
    size = given.get("max_batch_size", 0)
    if type(size) is not int or size < 0:
        raise ValueError(f"{_TRITON_KEY}.max_batch_size must be an integer of at least 0, got {size!r}")
    if not isinstance(given.get(_MULTIMODAL) or False, bool):  # images are taken where the model takes them
        raise ValueError(f"{_TRITON_KEY}.{_MULTIMODAL} must be true or false, got {given[_MULTIMODAL]!r}")
    return given


def read_vllm_arguments(version_folder: Path) -> dict[str, str]:
    """Return the version's `model.json`, if any, as parameters. Raises INVALID for a file that is not a JSON object."""
    path = version_folder / VLLM_FILE
    if not path.is_file():
        return {}
    try:
        arguments = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise invalid(VLLM_FILE, f"cannot read {path}: {error}") from None
    return {key: parameter_text(value) for key, value in arguments.items() if value is not None and value != ""}


def parameter_text(value: Any) -> str:
    """Return a value of an argument file as the text of a parameter of config.pbtxt."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def parse_lora_modules(text: str) -> dict[str, str]:
    """Parse LoRA adapters, `NAME=FOLDER,NAME=FOLDER` or a JSON object, to folders by name. Raises ValueError, which
    says what the text must be."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, str])
        except msgspec.DecodeError as error:
            raise ValueError(f"must be a JSON object of folders by name ({error})") from None
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, folder = (each.strip() for each in part.partition("="))
        if not name or not folder or name in found:
            raise ValueError("must be names of adapters with their folders, such as sql=/loras/sql,chat=/loras/chat")
        found[name] = folder
    return found


def read_lora_file(version_folder: Path) -> str | None:
    """Return the version's `multi_lora.json`, None without one. Raises INVALID for text that names no adapters."""
    path = version_folder / LORA_FILE
    if not path.is_file():
        return None
    text = path.read_text("utf-8", errors="replace")
    try:
        parse_lora_modules(text)
    except ValueError as error:
        raise invalid("lora_modules", f"{path} {error}") from None
    return text
