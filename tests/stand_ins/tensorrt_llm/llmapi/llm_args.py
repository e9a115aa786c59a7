# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The configuration classes of this version."""

from typing import Any

from .._stand_in.configurations import CONFIGURATIONS, StrictBaseModel

for _name, _class in CONFIGURATIONS.items():
    _class.__module__ = "tensorrt_llm.lora_helper" if _name == "LoraConfig" else __name__
    globals()[_name] = _class

LlmArgs = CONFIGURATIONS["TorchLlmArgs"]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["LlmArgs", "StrictBaseModel", *CONFIGURATIONS]
