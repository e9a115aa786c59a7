"""From an annotation's text to a type that pydantic can check."""

import pathlib
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any

import pydantic

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
    """Instances of a dataclass, or dictionaries of its fields."""
    return Annotated[Any, pydantic.BeforeValidator(partial(_made, value_class))]


def _made(value_class: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return value_class(**value)
    if not isinstance(value, value_class):
        raise ValueError(f"must be a {value_class.__name__}, got {type(value).__name__}")
    return value


def type_of(annotation: str, resolve: Callable[[str], Any]) -> Any:
    """`resolve` gives a class of the stand-in by its name, or None."""
    names: dict[str, Any] = {name: getattr(typing, name) for name in typing.__all__}
    names |= {"NoneType": None, "pathlib": pathlib, "pydantic": pydantic, **_NUMBERS}
    names |= {name: _Place(resolve, name) for name in ("tensorrt_llm", "torch", "transformers")}
    return eval(annotation, names)
