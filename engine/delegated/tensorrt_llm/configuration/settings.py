"""Every setting of TensorRT-LLM that flags and config.pbtxt can make: one table of names, types, targets and versions.

`docs/tensorrt-llm.md` shows it (a test compares). The rows are in `catalogue/`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from engine.delegated.tensorrt_llm.configuration.catalogue.adapters import ADAPTERS
from engine.delegated.tensorrt_llm.configuration.catalogue.elsewhere import ELSEWHERE
from engine.delegated.tensorrt_llm.configuration.catalogue.engines import ENGINES, TRANSFER
from engine.delegated.tensorrt_llm.configuration.catalogue.execution import EXECUTION
from engine.delegated.tensorrt_llm.configuration.catalogue.kv_cache import KV_CACHE
from engine.delegated.tensorrt_llm.configuration.catalogue.parallelism import PARALLELISM
from engine.delegated.tensorrt_llm.configuration.catalogue.scheduling import SCHEDULING
from engine.delegated.tensorrt_llm.configuration.catalogue.speculation import SPECULATION
from engine.delegated.tensorrt_llm.configuration.catalogue.statistics import STATISTICS
from engine.delegated.tensorrt_llm.configuration.setting import Setting
from sluice.errors import SluiceError, invalid

__all__ = ["GROUPS", "SETTINGS", "Setting", "check_settings", "given", "near", "without_effect"]

GROUPS: Mapping[str, tuple[Setting, ...]] = MappingProxyType(
    {
        "KV cache": KV_CACHE,
        "Scheduling": SCHEDULING,
        "Loading and computing": EXECUTION,
        "Parallelism": PARALLELISM,
        "LoRA": ADAPTERS,
        "Speculation": SPECULATION,
        "Statistics": STATISTICS,
        "Compiled engines": ENGINES,
        "Transfer of KV blocks": TRANSFER,
        "Without effect": ELSEWHERE,
    }
)
"""All rows by subject."""

_UNFILLED = re.compile(r"\$\{\w*\}")
"""A place of tensorrtllm_backend's templates that nobody filled."""


def _by_name(rows: Iterable[Setting]) -> dict[str, Setting]:
    named: dict[str, Setting] = {}
    for row in rows:
        for name in (row.name, *row.aliases):
            assert name not in named, f"two settings are called {name}"
            named[name] = row
    return named


SETTINGS: Mapping[str, Setting] = MappingProxyType(_by_name(row for rows in GROUPS.values() for row in rows))
"""By name and by alias."""


def check_settings(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values by target, those of the adapter's own settings by name. What is empty or unfilled is left out.

    Raises SluiceError INVALID, naming the setting, what came and what was expected; an unknown name with those that
    are near; two names for one target that say different things.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, row, value in given(texts):
        if row.no_effect:
            continue
        target = row.target or row.name
        if target in values and values[target] != value:
            other = names[target]
            raise invalid(
                name, f"{name} is {texts[name]} and {other} is {texts[other]}, but both set {target}; give one of them"
            )
        values[target], names[target] = value, name
    return values


def given(texts: Mapping[str, str]) -> list[tuple[str, Setting, Any]]:
    """(name as given, row, value) of each setting that says something. Raises SluiceError INVALID."""
    found = []
    for name, text in texts.items():
        row = SETTINGS.get(name)
        if row is None:
            raise _unknown(name)
        if text.strip() and not _UNFILLED.fullmatch(text.strip()):
            found.append((name, row, _parse(name, row, text)))
    return found


def without_effect(texts: Mapping[str, str]) -> list[str]:
    """A note on each of those given that change nothing."""
    return [f"{name} has no effect: {row.no_effect}" for name, row, _ in given(texts) if row.no_effect]


def _parse(name: str, row: Setting, text: str) -> Any:
    try:
        return row.parse(text)
    except ValueError as error:
        raise invalid(name, f"{name} must be {error}, got {text!r}") from None


def _unknown(name: str) -> SluiceError:
    return invalid(
        name, f"TensorRT-LLM's adapter knows no setting {name!r}{near(name, SETTINGS)}; docs/tensorrt-llm.md lists them"
    )


def near(name: str, known: Iterable[str]) -> str:
    """ ", did you mean ...?" with the most alike of the known names, else ""."""
    alike = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""
