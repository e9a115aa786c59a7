"""What the stand-in was given, for tests that ask."""

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from .settings import settings
from .work import Order


def record_arguments(arguments: Any) -> None:
    """Those that were given, defaults left out."""
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
