# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The arguments and requests that the stand-in is given: recorded for tests, and checked as late as the bindings do."""

import json
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any

import pydantic

from ..sampling_params import GuidedDecodingParams
from .settings import settings
from .specifications import specification, type_of
from .work import Order


def record_arguments(arguments: Any) -> None:
    """Record the arguments that were given, without defaults."""
    _record({"arguments": arguments.model_dump(mode="json", exclude_unset=True, fallback=repr)})


def record_request(order: Order, lora: Any) -> None:
    params = order.sampling_params
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    _record(
        {
            "request_id": order.request_id,
            "prompt_token_ids": order.prompt_token_ids,
            "sampling_params": {key: _plain(value) for key, value in values.items() if value is not None},
            "streaming": order.streaming,
            "lora_request": _plain(lora),
            "cache_salt": order.salt,
        }
    )


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _record(told: dict[str, Any]) -> None:
    path = settings().record
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(told, default=repr) + "\n")


@cache
def _checks() -> dict[str, pydantic.TypeAdapter[Any]]:
    told = specification("sampling_params", settings().surface).methods["__init__"]
    known = {"GuidedDecodingParams": GuidedDecodingParams}.get
    config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    return {
        name: pydantic.TypeAdapter(type_of(parameter.annotation, known), config=config)
        for name, parameter in told.items()
    }


def check_types(params: Any) -> None:
    """Check sampling parameters as the bindings do when a request is sent. Raises TypeError."""
    for name, check in _checks().items():
        try:
            check.validate_python(getattr(params, name))
        except pydantic.ValidationError as error:
            raise TypeError(f"SamplingParams.{name}: {error}") from None
