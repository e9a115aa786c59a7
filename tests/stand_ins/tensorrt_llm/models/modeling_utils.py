# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""Quantisation of a checkpoint."""

from fnmatch import fnmatch
from typing import Any

from .._stand_in.values import Convertible, make_value


class _Quantisation(Convertible):
    """Methods of QuantConfig."""

    __slots__ = ()

    def is_module_excluded_from_quantization(self: Any, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.exclude_modules or ())


QuantConfig = make_value("QuantConfig", "quant_config", _Quantisation, __name__)
