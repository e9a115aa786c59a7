"""The model's Python file, and what is said when it fails."""

import importlib
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

CLASS = "TritonPythonModel"
_OURS = str(Path(__file__).parent)


def import_model(file: Path) -> Any:
    """The model's class. Modules beside the file, and beside its version's folder, can be imported by it."""
    if file.suffix != ".py":
        raise ImportError(f"Model name must end with '.py'. Model name is \"{file.name}\".")
    if not file.is_file():
        raise FileNotFoundError(f"the model file '{file}' does not exist")
    # A model's folder is not ours to write into, and who polls it would take a cache for a change.
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(file.parent), str(file.parent.parent)]
    module = importlib.import_module(f"{file.parent.name}.{file.stem}")
    return getattr(module, CLASS)


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
