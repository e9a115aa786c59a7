"""Calibration of a quantisation; `llmapi.llm_utils` shows it. Here the arguments' classes can name it."""

from dataclasses import asdict
from typing import Any

from .values import make_value


class _Calibration:
    """What a CalibConfig can do."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    def to_dict(self: Any) -> dict[str, Any]:
        return asdict(self)


CalibConfig = make_value("CalibConfig", "calib_config", _Calibration, "tensorrt_llm.llmapi.llm_utils")
