"""Start of a worker process: `PYTHON start.py LAUNCH`, run before anything but the standard library is imported.

The interpreter may be that of an environment without Sluice. The server's installation then provides the packages that
the worker needs and the environment lacks, and nothing else can be imported from there.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from io import TextIOWrapper
from types import ModuleType

OWN_PACKAGE = "serving"


class _PackageFinder:
    """Finds packages by name, each in a folder of its own."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self._folders.get(name)
        return PathFinder.find_spec(name, [folder]) if folder is not None else None


def main(argv: list[str]) -> int:
    faulthandler.enable()
    # The server must have a line before a crash, which would take what is in a buffer with it.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
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
    packages: dict[str, str] = launch["packages"]
    # Our package wins over a module of that name beside the model; the others only fill gaps.
    sys.meta_path.insert(0, _PackageFinder({OWN_PACKAGE: packages.pop(OWN_PACKAGE)}))
    sys.meta_path.append(_PackageFinder(packages))

    from serving.backends.python.worker.main import main as serve

    return serve(launch["socket"], launch["progress"])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
