# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""Types of sampling parameters, checked as late as the bindings do it."""

from functools import cache
from typing import Any

import pydantic

from ..sampling_params import GuidedDecodingParams
from .annotations import type_of
from .settings import settings
from .specifications import specification


@cache
def _checks() -> dict[str, pydantic.TypeAdapter[Any]]:
    told = specification("sampling_params", settings().version).methods["__init__"]
    known = {"GuidedDecodingParams": GuidedDecodingParams}.get
    config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    return {
        name: pydantic.TypeAdapter(type_of(parameter.annotation, known), config=config)
        for name, parameter in told.items()
    }


def check_types(params: Any) -> None:
    """As the bindings do when a request is sent. Raises TypeError."""
    for name, check in _checks().items():
        try:
            check.validate_python(getattr(params, name))
        except pydantic.ValidationError as error:
            raise TypeError(f"SamplingParams.{name}: {error}") from None
