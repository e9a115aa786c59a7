"""The stand-in imported into this process, in one of its versions at a time."""

import importlib
import sys
from types import ModuleType

_PACKAGE = "tensorrt_llm"


class StandInCache:
    """Keeps the modules of each version: making the stand-in's classes takes a quarter of a second."""

    def __init__(self) -> None:
        self._loaded: dict[str, dict[str, ModuleType]] = {}
        self._current = ""

    def load(self, version: str) -> ModuleType:
        """Return what `import tensorrt_llm` brings where the environment, which must name the version, is as now."""
        self.unload()
        self._current = version
        sys.modules.update(self._loaded.get(version, {}))
        package = importlib.import_module(_PACKAGE)
        importlib.import_module(f"{_PACKAGE}._stand_in.settings").settings.cache_clear()
        return package

    def unload(self) -> None:
        names = [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]
        modules = {name: sys.modules.pop(name) for name in names}
        if self._current and _PACKAGE in modules:
            self._loaded[self._current] = modules
        self._current = ""


STAND_INS = StandInCache()
