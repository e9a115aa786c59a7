"""Plain values with rules of their own, made from the files as dataclasses."""

from dataclasses import field, make_dataclass
from typing import Any

from .settings import settings
from .specifications import REQUIRED, Parameter, specification


def make_value(name: str, file: str, base: type, module: str, more: dict[str, Parameter] | None = None) -> Any:
    """A dataclass of keyword arguments with the fields of `file`; `base` has its rules."""
    told = {**specification(file, settings().version).methods["__init__"], **(more or {})}
    fields = [(key, parameter.annotation, _field(parameter)) for key, parameter in told.items()]
    made = make_dataclass(name, fields, bases=(base,), kw_only=True, slots=True)
    made.__module__ = module
    return made


def _field(parameter: Parameter) -> Any:
    if parameter.default is REQUIRED:
        return field()
    return field(default=parameter.default)
