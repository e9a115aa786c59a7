"""How a worker's process begins: `PYTHON start.py LAUNCH`, before anything but the standard library is imported.

It runs in the interpreter of an environment that may know nothing of Sluice: what the worker needs and the environment
lacks is lent by the server's own installation, and nothing else of that can be imported.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OURS = "serving"


class _Lender:
    """Finds packages by name, each in a folder of its own."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self._folders.get(name)
        return PathFinder.find_spec(name, [folder]) if folder is not None else None


def main(argv: list[str]) -> int:
    launch = json.loads(argv[1])
    sys.argv = argv[:1]
    # This script's own folder, whose modules are not to be imported by their bare names.
    del sys.path[0]
    if launch["cores"]:
        # Before numpy is imported: the threads of its libraries keep to what holds when they are made.
        os.sched_setaffinity(0, launch["cores"])
    environ = os.environ  # noqa: TID251 - the model's own, which the processes that it starts inherit
    environ.update(launch["variables"])
    if launch["bin"]:
        environ["PATH"] = os.pathsep.join([launch["bin"], environ.get("PATH", os.defpath)])
    lent: dict[str, str] = launch["lent"]
    # The model may have a module of the same name as ours; what is lent only stands in for what is not there.
    sys.meta_path.insert(0, _Lender({OURS: lent.pop(OURS)}))
    sys.meta_path.append(_Lender(lent))

    from serving.backends.python.worker.main import main as serve

    return serve(launch["socket"], launch["progress"])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
