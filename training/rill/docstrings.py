"""Reads facts from the docstrings of the running standard library."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from training.rill.facts import Fact
from training.rill.text import is_plain_english

# Imports of these open a browser, print a poem, or need a test suite or a display.
_SKIP = frozenset({"antigravity", "this", "idlelib", "turtledemo", "lib2to3", "test"})


def _import_quietly(name: str) -> ModuleType | None:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception:  # a module of another platform may fail in any way
            return None


def _signature(name: str, value: Any) -> str:
    try:
        text = name + str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return "" if len(text) > 200 or "<" in text or " at 0x" in text else text


def _fact(kind: str, name: str, value: Any, module: str) -> Fact | None:
    doc = inspect.getdoc(value)
    if not doc or len(doc) < 20:
        return None
    signature = _signature(name, value)
    first, *rest = re.split(r"\n\s*\n", doc.strip())
    if "->" in first and rest and len(first) < 150:  # C functions open with their signature
        signature, first = first.strip(), rest[0]
    body = " ".join(first.split())
    if len(body) < 25 or not is_plain_english(body):
        return None
    return Fact("python", kind, name, signature, body, f"docstring/{module}")


def _members(module: ModuleType, name: str) -> Iterator[tuple[str, str, Any]]:
    prefix = "" if name == "builtins" else f"{name}."
    for attribute, value in list(vars(module).items()):
        owner = getattr(value, "__module__", name)
        if attribute.startswith("_") or owner not in {name, None}:
            continue
        if inspect.isclass(value):
            yield "class", prefix + attribute, value
            for method, function in list(vars(value).items()):
                if not method.startswith("_") and callable(function):
                    yield "method", f"{attribute}.{method}", function
        elif callable(value):
            yield "function", prefix + attribute, value


def docstring_facts() -> Iterator[Fact]:
    """Yield every public class, method and function of the standard library once."""
    seen: set[str] = set()
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _SKIP:
            continue
        module = _import_quietly(name)
        if module is None:
            continue
        for kind, qualified, value in [("module", name, module), *_members(module, name)]:
            if qualified not in seen and (fact := _fact(kind, qualified, value, name)):
                seen.add(qualified)
                yield fact
