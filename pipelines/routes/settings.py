"""The file of `--routes`: which names stand for which models, and how their requests are sent on."""

import re
from collections.abc import Iterable
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from sluice.engine.yaml_text import load_yaml

ROUTES_FLAG = "--routes"
_MAX_TARGETS = 32
_MAX_ROUTES = 256
_MAX_NAME_CHARS = 256
_SHOWN_CHARS = 60


class TargetChoice(StrEnum):
    """How a request's first target is chosen: always the first one, or by chance and weight."""

    ORDERED = "ordered"
    WEIGHTED = "weighted"


class TargetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of a route. `timeout_s` is how long its first token may take; None: as long as the request's own
    deadline lets it. One of weight 0 is asked after all others only."""

    model: str
    weight: float = 1.0
    timeout_s: float | None = None


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a target's circuit breaker opens, and for how long (`pipelines/routes/target.py`)."""

    failures: int = 5
    failure_rate: float = 0.5
    window: int = 20
    open_s: float = 5.0
    max_open_s: float = 60.0


class RouteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One route. `retries` are further attempts after the first, None for one with each other target; before a target
    is asked again there is a delay of `retry_delay_ms`, twice as long in each further round."""

    targets: tuple[TargetSettings, ...]
    choose: TargetChoice = TargetChoice.ORDERED
    retries: int | None = None
    retry_delay_ms: float = 50.0
    hedge_after_ms: float | None = None
    hedge_max_tokens: int = 64
    cache: bool | Literal["shared"] = False
    breaker: BreakerSettings = BreakerSettings()
    description: str = ""

    @property
    def num_attempts(self) -> int:
        """Most attempts for one answer."""
        return len(self.targets) if self.retries is None else 1 + self.retries


_NUMBERS: dict[str, tuple[float, float]] = {
    "weight": (0, 1e6),
    "timeout_s": (0.001, 86_400),
    "failures": (1, 10_000),
    "failure_rate": (0.01, 1),
    "window": (1, 10_000),
    "open_s": (0.001, 86_400),
    "max_open_s": (0.001, 86_400),
    "retries": (0, 100),
    "retry_delay_ms": (0, 60_000),
    "hedge_after_ms": (1, 600_000),
    "hedge_max_tokens": (1, 1_000_000),
}
"""Least and greatest values of the fields that are numbers."""
_WORDS = {"choose": "ordered or weighted", "cache": "true, false or shared"}


def read_routes(path: str) -> dict[str, RouteSettings]:
    """Read the routes of a file of YAML or JSON, by name. Raises ValueError, which names the file, the route, the
    field, what it has and what was expected."""
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{ROUTES_FLAG} {path} cannot be read: {' '.join(str(error).split())}") from None
    try:
        return parse_routes(content)
    except ValueError as error:
        raise ValueError(f"{ROUTES_FLAG} {path}: {error}") from None


def parse_routes(content: object) -> dict[str, RouteSettings]:
    """Return the routes in the content of a file. Raises ValueError as `read_routes`, without the file."""
    if not isinstance(content, dict) or content.keys() != {"routes"} or not isinstance(content["routes"], dict):
        raise ValueError(f"the file must have one field, routes: {{NAME: {{targets: ...}}}}, got {_shown(content)}")
    routes = content["routes"]
    if not 1 <= len(routes) <= _MAX_ROUTES:
        raise ValueError(f"routes must have from 1 to {_MAX_ROUTES} names, got {len(routes)}")
    parsed = {_check_name(name): _parse_route(name, fields) for name, fields in routes.items()}
    for name, settings in parsed.items():
        _check_targets(name, settings, parsed)
    return parsed


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable() or "," in name:
        what = f"a name must be a text of 1 to {_MAX_NAME_CHARS} printable characters without a comma"
        raise ValueError(f"{what}, got {_shown(name)}")
    return name


def _parse_route(name: str, fields: Any) -> RouteSettings:
    try:
        settings = msgspec.convert(fields, RouteSettings)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field = place.strip("`.")
        got = _shown(_value_at(fields, field))
        if field in _WORDS:
            raise ValueError(f"route {name!r}: {field} must be {_WORDS[field]}, got {got}") from None
        raise ValueError(f"route {name!r}: {field or 'its fields'}: {what[0].lower()}{what[1:]}, got {got}") from None
    parts: list[tuple[str, Any]] = [("", settings), ("breaker.", settings.breaker)]
    parts += [(f"targets[{index}].", target) for index, target in enumerate(settings.targets)]
    for prefix, fields_there in parts:
        _check_numbers(name, prefix, fields_there)
    if settings.breaker.max_open_s < settings.breaker.open_s:
        least, most = settings.breaker.open_s, settings.breaker.max_open_s
        raise ValueError(f"route {name!r}: breaker.max_open_s must be at least open_s ({least:g}), got {most:g}")
    return settings


def _check_numbers(route: str, prefix: str, part: Any) -> None:
    for field in part.__struct_fields__:
        value = getattr(part, field)
        if field not in _NUMBERS or value is None:
            continue
        low, high = _NUMBERS[field]
        if not isfinite(value) or not low <= value <= high:
            raise ValueError(f"route {route!r}: {prefix}{field} must be from {low:g} to {high:g}, got {value:g}")


def _check_targets(name: str, settings: RouteSettings, routes: Iterable[str]) -> None:
    models = [each.model for each in settings.targets]
    if not 1 <= len(models) <= _MAX_TARGETS:
        raise ValueError(f"route {name!r}: targets must be from 1 to {_MAX_TARGETS} models, got {len(models)}")
    for index, model in enumerate(models):
        where = f"route {name!r}: targets[{index}].model"
        if not 0 < len(model) <= _MAX_NAME_CHARS or not model.isprintable() or "," in model:
            raise ValueError(f"{where} must be the name of a model, got {_shown(model)}")
        if model == name:
            raise ValueError(f"{where} must be a model, got the route itself: {name} -> {name}")
        if model in routes:
            raise ValueError(f"{where} must be a model, got the route {model!r}: a route's targets are no routes")
        if model in models[:index]:
            raise ValueError(f"{where} must be a model that no target before it has, got {model!r} again")
    if settings.choose is TargetChoice.WEIGHTED and not any(each.weight for each in settings.targets):
        raise ValueError(f"route {name!r}: targets must have a weight above 0, got 0 for each, with choose: weighted")


def _value_at(content: Any, place: str) -> Any:
    """Return the value at a place such as `targets[0].weight`; what is around it where it is missing."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        try:
            content = content[int(index)] if index else content[key]
        except (KeyError, IndexError, TypeError):
            return content
    return content


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
