# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""Quantisation of a checkpoint."""

import typing
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, Optional

from .._stand_in.values import Convertible, make_value
from ..quantization import mode

tensorrt_llm = import_module(__name__.partition(".")[0])
"""The annotations of the files' fields can be read with these names."""
List = typing.List  # noqa: UP006
ANNOTATION_NAMES = (List, Optional, mode, tensorrt_llm)


class _Quantisation(Convertible):
    """Methods of QuantConfig."""

    __slots__ = ()

    def is_module_excluded_from_quantization(self: Any, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.exclude_modules or ())


QuantConfig = make_value("QuantConfig", "quant_config", _Quantisation, __name__)
