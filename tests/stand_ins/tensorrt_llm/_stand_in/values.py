"""Plain values with rules of their own, made from the files as dataclasses."""

from dataclasses import asdict, field, make_dataclass
from typing import Any

from .settings import settings
from .specifications import REQUIRED, Parameter, specification


def make_value(name: str, file: str, base: type, module: str, more: dict[str, Parameter] | None = None) -> Any:
    """Make a dataclass of keyword arguments with the fields of `file`; `base` has its rules."""
    told = {**specification(file, settings().surface).methods["__init__"], **(more or {})}
    fields = [(key, parameter.annotation, _field(parameter)) for key, parameter in told.items()]
    made = make_dataclass(name, fields, bases=(base,), kw_only=True, slots=True)
    made.__module__ = module
    return made


def _field(parameter: Parameter) -> Any:
    if parameter.default is REQUIRED:
        return field()
    return field(default=parameter.default)


class Convertible:
    """Converts a value from and to a dictionary."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    def to_dict(self: Any) -> dict[str, Any]:
        return asdict(self)


CalibConfig = make_value("CalibConfig", "calib_config", Convertible, "tensorrt_llm.llmapi.llm_utils")
"""`llmapi.llm_utils` shows it; the arguments' classes can name it from here."""
