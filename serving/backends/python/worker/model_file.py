"""The model's Python file, and what is said when it fails."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

CLASS = "TritonPythonModel"
_OURS = str(Path(__file__).parent)


def import_model(file: Path) -> Any:
    """The model's class. The folder of its version is a package, so that it may import `from .` what lies there.

    Modules beside the file, and beside its version's folder, can be imported by their names too, behind all others.
    """
    if file.suffix != ".py":
        raise ImportError(f"Model name must end with '.py'. Model name is \"{file.name}\".")
    if not file.is_file():
        raise FileNotFoundError(f"the model file '{file}' does not exist")
    # A model's folder is not ours to write into, and who polls it would take a cache for a change.
    sys.dont_write_bytecode = True
    sys.path += [str(file.parent), str(file.parent.parent)]
    _add_package(file.parent)
    module = importlib.import_module(f"{file.parent.name}.{file.stem}")
    return getattr(module, CLASS)


def _add_package(folder: Path) -> None:
    """The folder as a package of its name, whatever else of that name can be found on the path."""
    init = folder / "__init__.py"
    if not init.is_file():
        sys.modules[folder.name] = package = ModuleType(folder.name)
        package.__path__ = [str(folder)]
        return
    spec = importlib.util.spec_from_file_location(folder.name, init, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def describe(error: BaseException) -> str:
    """The error and where it was raised, innermost first, as the real server writes it."""
    text = f"{type(error).__name__}: {error}"
    places = _places(error.__traceback__)
    if places:
        text += "\n\nAt:\n" + "".join(f"  {place}\n" for place in places)
    return text


def _places(traceback: TracebackType | None) -> list[str]:
    """The frames of the model and of what it called, without ours and the importing machinery's."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        file = code.co_filename
        if not file.startswith((_OURS, "<frozen importlib")) and "importlib/__init__" not in file:
            places.append(f"{file}({traceback.tb_lineno}): {code.co_name}")
        traceback = traceback.tb_next
    return places[::-1]
