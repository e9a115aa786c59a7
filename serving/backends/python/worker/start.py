"""Start of a worker process: `PYTHON start.py LAUNCH`, run before anything but the standard library is imported.

The worker's modules are imported as `_sluice.serving...`, and Sluice's own cannot be found by their name: a model may
have a `sluice.py` beside it, or a package of this name. Where the interpreter is that of another environment,
the server's installation provides the packages that the worker needs and the environment lacks, and no others.
"""

import builtins
import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

OWN_PACKAGE = "sluice"
"""The package that an installation of Sluice adds to an environment; the worker's own modules are in it."""
_ALIAS = "_sluice"
"""The name of OWN_PACKAGE in a worker; no module of a model has this name."""
_FOLDER = str(Path(__file__).parents[4])


class _OwnLoader(SourceFileLoader):
    """Loads a module of the worker, in which `sluice` means `_sluice`, also in an import that runs later."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = _OWN_BUILTINS
        super().exec_module(module)


def _import_own(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    if name.partition(".")[0] == OWN_PACKAGE and level == 0:
        assert fromlist, "the worker's modules import each other by `from`"
        name = f"_{name}"
    return __import__(name, globals, locals, fromlist or (), level)


_OWN_BUILTINS = {**vars(builtins), "__import__": _import_own}


class _OwnFinder:
    """Finds the modules of the worker, which are below `_sluice`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_ALIAS}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _OwnLoader(spec.loader.name, spec.loader.path)
        return spec


class _ModelPathFinder(PathFinder):
    """Finds what the model imports on `sys.path`, but of packages called `sluice` only the model's own."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and fullname == OWN_PACKAGE:
            path = [folder for folder in sys.path if not _has_sluice(folder)]
        return super().find_spec(fullname, path, target)


def _has_sluice(folder: str) -> bool:
    """Return whether the folder has an installation of Sluice, or what one that is edited in place leaves there."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return False
    return any(name.startswith("sluice-") and name.endswith(".dist-info") for name in names) or is_source_tree(folder)


def is_source_tree(folder: str) -> bool:
    """Return whether the folder is a source tree of Sluice."""
    own = os.path.join(folder, *Path(__file__).parts[-6:])
    return os.path.isfile(own) and os.path.isfile(os.path.join(folder, "pyproject.toml"))


class _PackageFinder:
    """Finds packages by name, each in a folder of its own."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self._folders.get(name)
        return PathFinder.find_spec(name, [folder]) if folder is not None else None


def hide_sluice() -> None:
    """Keep the model's imports from Sluice's package. Modules that a source tree has beside them are no packages."""
    sys.path[:] = [folder for folder in sys.path if not is_source_tree(folder)]
    sys.meta_path[:] = [_ModelPathFinder if each is PathFinder else each for each in sys.meta_path]


def _provide_own(packages: dict[str, str]) -> None:
    own = ModuleType(_ALIAS)
    own.__path__ = [_FOLDER]
    sys.modules[_ALIAS] = own
    sys.meta_path.insert(0, _OwnFinder)
    # These only fill gaps.
    sys.meta_path.append(_PackageFinder(packages))


def main(argv: list[str]) -> int:
    faulthandler.enable()
    # The server must have a line before a crash, which would take what is in a buffer with it.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    launch = json.loads(argv[1])
    sys.argv = argv[:1]
    # Remove this script's folder: its modules must not be importable by their bare names.
    del sys.path[0]
    if launch["cores"]:
        # Before numpy is imported, because the threads of its libraries inherit the affinity.
        os.sched_setaffinity(0, launch["cores"])
    environ = os.environ  # noqa: TID251 - the environment of the model and of processes that it starts
    environ.update(launch["variables"])
    if launch["bin"]:
        environ["PATH"] = os.pathsep.join([launch["bin"], environ.get("PATH", os.defpath)])
    hide_sluice()
    _provide_own(launch["packages"])
    worker = importlib.import_module(f"{_ALIAS}.serving.backends.python.worker.main")
    code: int = worker.main(launch["socket"], launch["progress"])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
elif __name__ == "__mp_main__":
    # A process that the model has started by `multiprocessing`; it finds modules as the worker does.
    hide_sluice()
    _provide_own({})
