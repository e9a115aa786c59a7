"""Signatures of hand-written methods, checked against the files and shown in their words."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from .settings import settings
from .specifications import REQUIRED, Parameter, Specification, specification

C = TypeVar("C", bound=type)


def declared(name: str) -> Callable[[C], C]:
    """Class decorator: every method that the file `name` tells must have its parameters and defaults.

    Raises TypeError where it does not: then the stand-in is not what it says it is.
    """

    def decorate(cls: C) -> C:
        told = specification(name, settings().version)
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
