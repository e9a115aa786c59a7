"""The public surface of TensorRT-LLM as the files in tests/data/tensorrt_llm tell it, for one version."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_DATA = Path(__file__).parents[3] / "data" / "tensorrt_llm"
_STABILITY = _DATA / "api_stability"
_COMMITTED_LLM = {"1.2.1": "llm.e00a1866.yaml", "1.3.0": "llm.yaml"}
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or a field. `annotation` is text, in the words of the files; `default` is REQUIRED where there is
    none."""

    annotation: str
    default: Any
    is_made: bool = False
    """Whether the default is a new object of the annotated class."""


@dataclass(frozen=True, slots=True)
class Specification:
    """One class: its methods' parameters and what they return, and the annotations of its properties."""

    methods: Mapping[str, Mapping[str, Parameter]]
    returns: Mapping[str, str]
    properties: Mapping[str, str]


@cache
def specification(name: str, version: str) -> Specification:
    """Of `name` (a file's name without ending): what is stable and what is not, together."""
    methods: dict[str, dict[str, Parameter]] = {}
    returns: dict[str, str] = {}
    properties: dict[str, str] = {}
    for text in _files(name, version):
        for method, told in text["methods"].items():
            own = methods.setdefault(method, {})
            own.update((key, _parameter(value)) for key, value in told["parameters"].items())
            returns[method] = str(told["return_annotation"])
        properties.update((key, _one_line(value["annotation"])) for key, value in text["properties"].items())
    return Specification(methods, returns, properties)


def _files(name: str, version: str) -> list[dict[str, Any]]:
    committed = _COMMITTED_LLM[version] if name == "llm" else f"{name}.yaml"
    paths = (_STABILITY / "references_committed" / committed, _STABILITY / "references" / f"{name}.yaml")
    return [yaml.safe_load(path.read_text()) for path in paths if path.is_file()]


def _parameter(told: Mapping[str, Any]) -> Parameter:
    annotation, default = _one_line(str(told["annotation"])), told.get("default")
    if told.get("required") or default == "inspect._empty":
        return Parameter(annotation, REQUIRED)
    default = None if default == "None" else default
    is_made = default is None and annotation.startswith("tensorrt_llm.")
    return Parameter(annotation, default, is_made)


def _one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def config_fields(name: str, version: str) -> dict[str, Parameter] | None:
    """Fields of a class that has no API-stability file, those of its base included; None where a version lacks it."""
    told = dict(_configs()[name])
    if version not in told.pop("flavours", (version,)):
        return None
    base = told.pop("base", None)
    inherited = (config_fields(base, version) or {}) if base else {}
    return {**inherited, **_of_version(told, version)}


@cache
def config_names() -> tuple[str, ...]:
    """Of all versions."""
    return tuple(_configs())


@cache
def _configs() -> dict[str, Any]:
    return dict(yaml.safe_load((_DATA / "configs.yaml").read_text()))


def _of_version(told: Mapping[str, Any], version: str) -> dict[str, Parameter]:
    return {key: _parameter(value) for key, value in told.items() if version in value.get("flavours", (version,))}


@cache
def llm_arguments(version: str, *, is_engine: bool) -> dict[str, Parameter]:
    """Arguments of `TorchLlmArgs`, or of `TrtLlmArgs` for compiled engines."""
    told = yaml.safe_load((_DATA / "llm_args.yaml").read_text())
    arguments = dict(specification("llm", version).methods["__init__"])
    absent = {"kwargs", *told["gone"].get(version, ()), *(told["pytorch_only"] if is_engine else ())}
    arguments = {key: value for key, value in arguments.items() if key not in absent}
    for key in told["made"]:
        if key in arguments:
            arguments[key] = Parameter(arguments[key].annotation, None, is_made=True)
    more = told["more_engine"] if is_engine else told["more_pytorch"]
    return {**arguments, **_of_version(told["more"], version), **_of_version(more, version)}
