"""The stand-in, imported once a flavour: for tests that only look at its classes."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.stand_ins.paths import PATHS

ONLY_1_2 = pytest.mark.parametrize("flavour", ["1.2.1"], indirect=True)
ONLY_1_3 = pytest.mark.parametrize("flavour", ["1.3.0"], indirect=True)

_MODULES: dict[str, dict[str, ModuleType]] = {}


@contextmanager
def imported(flavour: str, patch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`tensorrt_llm` of this flavour, without faults, as long as the context lasts."""
    for path in PATHS:
        patch.syspath_prepend(str(path))
    patch.setenv("STAND_IN_VERSION", flavour)
    _unload()
    sys.modules.update(_MODULES.get(flavour, {}))
    try:
        yield importlib.import_module("tensorrt_llm")
    finally:
        _MODULES[flavour] = _unload()


def _unload() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "tensorrt_llm" or name.startswith("tensorrt_llm.")]
    return {name: sys.modules.pop(name) for name in names}
