"""The library's own classes of arguments: what this version of them lacks, the objects made of them, how they read."""

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from sluice.engine.delegated.tensorrt_llm.configuration.arguments import Resolution
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import ENGINES, FIELDS, versions_of
from sluice.engine.delegated.tensorrt_llm.library import field_names
from sluice.engine.runtime_settings import nearest_names
from sluice.errors import ErrorCode, SluiceError, invalid

_TAGS = ("decoding_type", "algorithm", "mode")
"""Fields that tell the classes of one argument apart."""
_WITHOUT_EFFECT = {
    "kv_cache_config.onboard_blocks": ((True, False), "always copies offloaded blocks back"),
    "sampler_type": (("auto", "TorchSampler"), "has TorchSampler alone"),
}
"""Arguments that newer versions dropped, the values that may be left out there, and what these versions do."""


# -- what the classes say


def config_classes(annotation: Any) -> tuple[type, ...]:
    """Return the configuration classes that an annotation allows: none for a plain value."""
    if isinstance(annotation, type) and (hasattr(annotation, "model_fields") or is_dataclass(annotation)):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return config_classes(get_args(annotation)[0])
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return tuple(each for part in parts for each in config_classes(part))


def tag_of(cls: Any) -> str:
    """Return the value of the field that tells a class from its alternatives, "" where it has none."""
    for name in _TAGS:
        info = getattr(cls, "model_fields", {}).get(name)
        value = getattr(cls, name, None) if info is None else info.default
        if isinstance(value, str):
            return value
    return ""


def classes_at(path: str, arguments_class: Any) -> tuple[type, ...]:
    """Return the configuration classes of a dotted argument; that of the LLM's arguments themselves for ""."""
    classes: tuple[type, ...] = (arguments_class,)
    for name in path.split(".") if path else ():
        annotations = [_annotations(cls).get(name) for cls in classes]
        classes = tuple(each for annotation in annotations for each in config_classes(annotation))
    return classes


def _annotations(cls: Any) -> Mapping[str, Any]:
    if hasattr(cls, "model_fields"):
        return {name: info.annotation for name, info in cls.model_fields.items()}
    try:
        return get_type_hints(cls) if is_dataclass(cls) else {}
    except NameError:  # written for type checkers alone: its fields are taken for plain values
        return {}


# -- what this version lacks


def check_arguments(resolution: Resolution) -> None:
    """Compare the arguments with the installed version. What is there by default, and what NVIDIA's own files have and
    newer versions do not need, is left out, the latter with a note. Raises UNIMPLEMENTED for another argument that this
    version lacks, naming those that have it; INVALID for one that no version has, naming those that are near."""
    arguments, version = resolution.arguments, resolution.library.version
    for target, argument in arguments.items():
        if FIELDS.get(target) == (ENGINES,) and not resolution.is_engine:
            only = "only compiled engines (TensorRT-LLM before 1.3) have it, and this model runs on PyTorch"
            raise arguments.refusal(target, f"cannot be used: {only}")
        missing = _missing(target, resolution)
        if missing is None:
            if arguments.is_given(target) and _is_deprecated(target, resolution.arguments_class):
                resolution.notes.append(
                    f"{argument.origin} is deprecated in TensorRT-LLM {version}, which may ignore it"
                )
        elif not arguments.is_given(target):
            arguments.drop(target)
        elif target in _WITHOUT_EFFECT and argument.value in _WITHOUT_EFFECT[target][0]:
            resolution.leave_out(target, f"TensorRT-LLM {version} {_WITHOUT_EFFECT[target][1]}")
        else:
            raise _lacking(target, argument.origin, missing, resolution)


def _missing(target: str, resolution: Resolution) -> tuple[str, frozenset[str]] | None:
    """Return the part of `target` that this version lacks, and the names that it has there; None where it has all. What
    may be in a plain mapping only the library knows."""
    path = ""
    for name in target.split("."):
        allowed = classes_at(path, resolution.arguments_class)
        classes = _chosen(allowed, resolution.arguments.get(f"{path}.{_TAGS[0]}"))
        names = frozenset(_TAGS if len(allowed) > 1 else ()).union(*(field_names(cls) for cls in classes))
        if classes and name not in names:
            return name, names
        path = f"{path}.{name}" if path else name
    return None


def _is_deprecated(target: str, arguments_class: Any) -> bool:
    parent, _, name = target.rpartition(".")
    infos = [getattr(cls, "model_fields", {}).get(name) for cls in classes_at(parent, arguments_class)]
    extras = [getattr(info, "json_schema_extra", None) for info in infos]
    return any(getattr(info, "deprecated", None) for info in infos) or any(
        isinstance(extra, dict) and extra.get("status") == "deprecated" for extra in extras
    )


def _lacking(target: str, origin: str, missing: tuple[str, frozenset[str]], resolution: Resolution) -> SluiceError:
    library = resolution.library
    if target in library.arguments(is_engine=not resolution.is_engine):
        return invalid(origin, f"{origin} cannot be used: only the PyTorch backend has the argument {target}")
    lacks = f"TensorRT-LLM {library.version} has no argument {target}"
    if versions := versions_of(target):
        message = f"{origin} cannot be used: {lacks}; {versions} can have it"
        return SluiceError(ErrorCode.UNIMPLEMENTED, message, param=origin)
    return invalid(origin, f"{lacks}{nearest_names(*missing)}")


# -- objects


def build_arguments(resolution: Resolution) -> dict[str, Any]:
    """Return keyword arguments of the LLM class. Raises SluiceError INVALID for what a class refuses."""
    annotations = _annotations(resolution.arguments_class)
    version = str(resolution.library.version)
    tree = resolution.arguments.nested()
    return {name: _build(name, value, annotations.get(name), version) for name, value in tree.items()}


def _build(path: str, value: Any, annotation: Any, version: str) -> Any:
    """Make the object of a configuration. A mapping whose class is not clear, and a value, are left to the library."""
    if isinstance(value, str):
        return _member(path, value, annotation)
    classes = config_classes(annotation)
    if not isinstance(value, dict) or not classes:
        return value
    tag = next((value[name] for name in _TAGS if name in value), None)
    chosen = _chosen(classes, tag)
    if len(chosen) > 1:
        return value
    hints = _annotations(chosen[0])
    given = {name: _build(f"{path}.{name}", inner, hints.get(name), version) for name, inner in value.items()}
    if tag is not None and len(classes) > 1:
        given = {name: inner for name, inner in given.items() if name not in _TAGS}  # the class says it
    try:
        return chosen[0](**given)
    except (ValueError, TypeError, AssertionError) as error:  # pydantic's is a ValueError; some classes assert
        reason = " ".join(str(error).split())
        raise invalid(path, f"TensorRT-LLM {version} refuses {path}: {reason}") from error


def _chosen(classes: tuple[type, ...], tag: Any) -> tuple[type, ...]:
    """Return the class of this tag alone, where there is one."""
    return tuple(cls for cls in classes if tag is not None and tag_of(cls) == tag)[:1] or classes


def _member(path: str, name: str, annotation: Any) -> Any:
    """Return the member that a word names where only an enumeration is allowed; dataclasses do not look it up."""
    kinds = [each for each in get_args(annotation) or (annotation,) if each is not type(None)]
    if len(kinds) != 1 or not (isinstance(kinds[0], type) and issubclass(kinds[0], Enum)):
        return name
    members = {**kinds[0].__members__, **{str(each.value): each for each in kinds[0]}}
    if name not in members:
        raise invalid(path, f"{path} must be one of {', '.join(kinds[0].__members__)}, got {name!r}")
    return members[name]


# -- how they read

_SECRET = re.compile(r"token(?!s|iz|_id|_length)|secret|password|api_?key|credential", re.IGNORECASE)
_WITHHELD = frozenset({"env_overrides"})


def as_python(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as Python code: `LLM(model='...', max_beam_width=2)`. What looks like a secret is left out."""
    return f"{name}({', '.join(f'{key}={_shown(key, value)}' for key, value in arguments.items())})"


def _shown(key: str, value: Any) -> str:
    if value is not None and (key in _WITHHELD or (isinstance(value, str) and _SECRET.search(key))):
        return "'...'"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    names = getattr(value, "model_fields_set", None)  # those that an object of the library's was made with
    names = getattr(value, "__dataclass_fields__", None) if names is None else sorted(names)
    if names is None:
        return repr(value)
    return as_python(type(value).__name__, {name: getattr(value, name) for name in names})
