"""Files of arguments for TensorRT-LLM's LLM class: trtllm-serve's extra options, and `model.yaml` of a version."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.errors import invalid

MODEL_FILE = "model.yaml"
"""Where NVIDIA's llmapi model has its arguments, in the version's folder."""

_TRITON = "triton_config"
_LIFTED = ("model", "tokenizer", "tensor_parallel_size", "pipeline_parallel_size")
"""Arguments that are parameters here: they say where things are, and how many GPUs are taken."""
_OF_TRITON = ("max_batch_size", "decoupled", "cancellation_check_period_ms")


@dataclass(frozen=True, slots=True)
class ModelYaml:
    """What a `model.yaml` says, in three parts."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the LLM class."""
    texts: dict[str, str] = field(default_factory=dict)
    """As parameters of config.pbtxt."""
    decoupled: bool | None = None
    """None where it does not say."""
    max_batch_size: int = 0


def read_arguments(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty one.

    Raises ValueError with the line and column for what is no YAML, and with what it must be for what is no mapping of
    names to values that JSON has too.
    """
    import msgspec
    import yaml  # takes a while, and few have such a file

    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except yaml.MarkedYAMLError as error:
        raise ValueError(_place(error.problem_mark) + str(error.problem or error.context or "it is no YAML")) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    if found is None:
        return {}
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Any])
    except (TypeError, ValueError, msgspec.MsgspecError):
        raise ValueError("it must be a mapping of arguments of TensorRT-LLM's LLM class, by name") from None


def _place(mark: Any) -> str:
    """YAML counts from 0."""
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def read_model_yaml(version_folder: Path) -> ModelYaml:
    """Nothing where there is no such file. Raises SluiceError INVALID with the file, the line and what is wrong."""
    path = version_folder / MODEL_FILE
    if not path.is_file():
        return ModelYaml()
    try:
        arguments = read_arguments(path)
        triton = _triton_config(arguments.pop(_TRITON, None) or {})
        _check_backend(arguments)
    except ValueError as error:
        raise invalid(MODEL_FILE, f"cannot take {path}: {error}") from None
    texts = {key: str(arguments.pop(key)) for key in _LIFTED if arguments.get(key) is not None}
    return ModelYaml(arguments, texts, triton.get("decoupled"), triton.get("max_batch_size", 0))


def _check_backend(arguments: dict[str, Any]) -> None:
    backend = arguments.get("backend")
    if backend not in (None, "pytorch", "tensorrt"):
        raise ValueError(f"backend must be pytorch or tensorrt, got {backend!r}")


def _triton_config(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{_TRITON} must be a mapping of {', '.join(_OF_TRITON)}")
    unknown = [key for key in given if key not in _OF_TRITON]
    if unknown:
        raise ValueError(f"{_TRITON} has no {unknown[0]!r}; there are {', '.join(_OF_TRITON)}")
    if not isinstance(given.get("decoupled", False), bool):
        raise ValueError(f"{_TRITON}.decoupled must be true or false, got {given['decoupled']!r}")
    size = given.get("max_batch_size", 0)
    if type(size) is not int or size < 0:
        raise ValueError(f"{_TRITON}.max_batch_size must be an integer of at least 0, got {size!r}")
    return given


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with what is nested in both merged too; `over` wins."""
    found = dict(under)
    for key, value in over.items():
        below = found.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        found[key] = value
    return found
