"""The stand-in imported into this process, in each of its versions."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.stand_ins.paths import PATHS

FLAVOURS = ("1.2.1", "1.3.0")
ONLY_1_2 = pytest.mark.parametrize("flavour", ["1.2.1"], indirect=True)
ONLY_1_3 = pytest.mark.parametrize("flavour", ["1.3.0"], indirect=True)
ONLY_1_4 = pytest.mark.parametrize("flavour", ["1.4.0"], indirect=True)
"""This one differs from 1.3.0 in its arguments alone."""


class StandInCache:
    """Keeps the modules of each set of settings: making the stand-in's classes takes most of a second."""

    def __init__(self) -> None:
        self._loaded: dict[frozenset[tuple[str, str]], dict[str, ModuleType]] = {}
        self._current: frozenset[tuple[str, str]] | None = None

    def load(self, patch: pytest.MonkeyPatch, settings: dict[str, str]) -> ModuleType:
        """Return what `import tensorrt_llm` brings where these variables, and no others of its own, are set."""
        for path in PATHS:
            patch.syspath_prepend(str(path))
        for name, value in settings.items():
            patch.setenv(name, value)
        self.unload()
        self._current = frozenset(settings.items())
        sys.modules.update(self._loaded.get(self._current, {}))
        return importlib.import_module("tensorrt_llm")

    def unload(self) -> None:
        names = [name for name in sys.modules if name == "tensorrt_llm" or name.startswith("tensorrt_llm.")]
        modules = {name: sys.modules.pop(name) for name in names}
        if self._current is not None and "tensorrt_llm" in modules:
            self._loaded[self._current] = modules
        self._current = None


STAND_INS = StandInCache()


@contextmanager
def imported(flavour: str, patch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import `tensorrt_llm` of this flavour, without faults, as long as the context lasts."""
    try:
        yield STAND_INS.load(patch, {"STAND_IN_VERSION": flavour})
    finally:
        STAND_INS.unload()
