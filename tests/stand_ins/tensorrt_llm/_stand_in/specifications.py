"""The public surface of TensorRT-LLM as the files in tests/data/tensorrt_llm tell it, for one version."""

import inspect
import pathlib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core
import yaml

from .settings import settings

_DATA = Path(__file__).parents[3] / "data" / "tensorrt_llm"
_STABILITY = _DATA / "api_stability"
_COMMITTED_LLM = {"1.2.1": "llm.e00a1866.yaml", "1.3.0": "llm.yaml", "1.4.0": "llm.yaml"}
_NEWEST = "1.4.0"
"""The version that is told by what `newest` changes in 1.3.0."""
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or a field. `annotation` is text, in the words of the files; `default` is REQUIRED where there is
    none."""

    annotation: str
    default: Any
    is_made: bool = False
    """Whether the default is a new object of the annotated class."""
    is_deprecated: bool = False


@dataclass(frozen=True, slots=True)
class Specification:
    """One class: its methods' parameters and what they return, and the annotations of its properties."""

    methods: Mapping[str, Mapping[str, Parameter]]
    returns: Mapping[str, str]
    properties: Mapping[str, str]


@cache
def specification(name: str, version: str) -> Specification:
    """Return the surface of `name` (a file's name without ending), stable and unstable members together."""
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
    return [_load(path) for path in paths if path.is_file()]


def _load(path: Path) -> dict[str, Any]:
    """Read a file, with libyaml where it is there: Python's own parser is a third of a process' start."""
    loaded: dict[str, Any] = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


def _parameter(told: Mapping[str, Any]) -> Parameter:
    annotation, default = _one_line(str(told["annotation"])), told.get("default")
    if told.get("required") or default == "inspect._empty":
        return Parameter(annotation, REQUIRED)
    default = None if default == "None" else default
    is_made = default is None and annotation.startswith("tensorrt_llm.")
    return Parameter(annotation, default, is_made, bool(told.get("deprecated")))


def _one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def config_fields(name: str, version: str) -> dict[str, Parameter] | None:
    """Return the fields of a class without an API-stability file, its base's too; None where a version lacks it."""
    told = dict(_configs()[name])
    if not _is_in(told, version):
        return None
    told = {key: value for key, value in told.items() if key not in ("flavours", "newest")}
    base = told.pop("base", None)
    inherited = (config_fields(base, version) or {}) if base else {}
    return {**inherited, **_of_version(told, version)}


@cache
def config_names() -> tuple[str, ...]:
    """Return the configuration classes of all versions."""
    return tuple(_configs())


@cache
def _configs() -> dict[str, Any]:
    return dict(_load(_DATA / "configs.yaml"))


def _of_version(told: Mapping[str, Any], version: str) -> dict[str, Parameter]:
    newest = version == _NEWEST
    return {
        key: _parameter({**value, **(value.get("newest") or {})} if newest else value)
        for key, value in told.items()
        if _is_in(value, version)
    }


def _is_in(told: Mapping[str, Any], version: str) -> bool:
    """Return whether a version has a class or a field. The newest has what 1.3.0 has, unless its `newest` is null."""
    flavours = told.get("flavours", (version,))
    if version != _NEWEST:
        return version in flavours
    return told.get("newest", {}) is not None and bool({"1.3.0", _NEWEST} & {*flavours})


@cache
def llm_arguments(version: str, *, is_engine: bool) -> dict[str, Parameter]:
    """Return the arguments of `TorchLlmArgs`, or of `TrtLlmArgs` for compiled engines."""
    told = _load(_DATA / "llm_args.yaml")
    arguments = dict(specification("llm", version).methods["__init__"])
    absent = {"kwargs", *told["gone"].get(version, ()), *(told["pytorch_only"] if is_engine else ())}
    arguments = {key: value for key, value in arguments.items() if key not in absent}
    for key in told["made"]:
        if key in arguments:
            arguments[key] = Parameter(arguments[key].annotation, None, is_made=True)
    more = told["more_engine"] if is_engine else told["more_pytorch"]
    return {**arguments, **_of_version(told["more"], version), **_of_version(more, version)}


_NUMBERS = {
    "int": Annotated[int, pydantic.Strict()],
    "bool": Annotated[bool, pydantic.Strict()],
    "float": Annotated[float, pydantic.Strict()],
}
"""pydantic would read "8" as 8, which would hide an adapter's mistake."""


class _Place:
    """A dotted name. Where it ends at a class of the stand-in, the class; anything else is not checked."""

    def __init__(self, resolve: Callable[[str], Any], name: str) -> None:
        self._resolve = resolve
        self._name = name

    def __getattr__(self, part: str) -> Any:
        known = self._resolve(part)
        if known is not None:
            return _instances(known) if is_dataclass(known) else known
        return Any if part[0].isupper() else _Place(self._resolve, f"{self._name}.{part}")


def _instances(value_class: Any) -> Any:
    """Make a type of a dataclass' instances, or dictionaries of its fields."""
    return Annotated[value_class, _InstanceOf(value_class)]


class _InstanceOf:
    """Has pydantic take a class' instances as they are. Its own annotations are texts, of which nothing can be made."""

    def __init__(self, value_class: Any) -> None:
        self._value_class = value_class

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return pydantic_core.core_schema.no_info_plain_validator_function(partial(_made, self._value_class))


def _made(value_class: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return value_class(**value)
    if not isinstance(value, value_class):
        raise ValueError(f"must be a {value_class.__name__}, got {type(value).__name__}")
    return value


def type_of(annotation: str, resolve: Callable[[str], Any]) -> Any:
    """Return the type that pydantic checks. `resolve` returns a class of the stand-in by its name, or None."""
    names: dict[str, Any] = {name: getattr(typing, name) for name in typing.__all__}
    names |= {"NoneType": None, "pathlib": pathlib, "pydantic": pydantic, **_NUMBERS}
    names |= {name: _Place(resolve, name) for name in ("tensorrt_llm", "torch", "transformers")}
    return eval(annotation, names)


C = TypeVar("C", bound=type)


def declared(name: str) -> Callable[[C], C]:
    """Class decorator: every method that the file `name` tells must have its parameters and defaults.

    Raises TypeError where it does not: then the stand-in is not what it says it is.
    """

    def decorate(cls: C) -> C:
        told = specification(name, settings().surface)
        for method in told.methods:
            _declare(cls, method, told)
        for attribute, annotation in told.properties.items():
            getter = inspect.getattr_static(cls, attribute).fget
            getter.__annotations__["return"] = annotation
        return cls

    return decorate


def _declare(cls: type, name: str, told: Specification) -> None:
    method: Any = inspect.getattr_static(cls, name)
    function = getattr(method, "__func__", method)
    own = inspect.signature(function)
    parameters = dict(own.parameters)
    for key, expected in told.methods[name].items():
        if key not in parameters and inspect.Parameter.VAR_KEYWORD in {each.kind for each in parameters.values()}:
            continue
        if key not in parameters or not _has_default(cls, parameters[key], expected):
            raise TypeError(f"{cls.__name__}.{name}({key}) is not as its file tells: {own}")
        parameters[key] = parameters[key].replace(annotation=expected.annotation)
    function.__signature__ = own.replace(parameters=list(parameters.values()), return_annotation=told.returns[name])


def _has_default(cls: Any, own: inspect.Parameter, expected: Parameter) -> bool:
    """A list that each object gets anew shows as None in the files."""
    made = {each.name: each.default_factory for each in fields(cls)} if is_dataclass(cls) else {}
    if own.default is REQUIRED or expected.default is REQUIRED:
        return own.default is expected.default
    if callable(factory := made.get(own.name)):
        return expected.default is None or bool(expected.default == factory())
    return bool(own.default == expected.default)
