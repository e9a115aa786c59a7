# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""Quantisation, and its calibration."""

from .._stand_in.values import CalibConfig
from ..models.modeling_utils import QuantConfig

__all__ = ["CalibConfig", "QuantConfig"]
