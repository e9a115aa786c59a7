"""OpenVINO without its model converter: importing that takes half of the time of importing OpenVINO, and reports each
import to OpenVINO's makers over the network, under an id that it keeps in the user's home.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_CONVERTER = "openvino.tools.ovc"


def defer_converter() -> None:
    """Make the first `import openvino` of this process leave its converter out. `openvino.convert_model` imports it
    when it is called. Nothing changes where OpenVINO has been imported already."""
    if "openvino" not in sys.modules and _CONVERTER not in sys.modules:
        sys.modules[_CONVERTER] = deferred = ModuleType(_CONVERTER)
        deferred.__dict__["convert_model"] = _convert_model


def _convert_model(*arguments: Any, **options: Any) -> Any:
    if sys.modules[_CONVERTER].__dict__.get("convert_model") is _convert_model:
        del sys.modules[_CONVERTER]
    return import_module(_CONVERTER).convert_model(*arguments, **options)
