"""Checks of changes to an engine's LoRA adapters, and the configuration for the next engine."""

from collections.abc import Mapping

import msgspec

from engine.config import EngineConfig
from engine.types import EngineInfo
from sluice.errors import ErrorCode, SluiceError, invalid


def check_new(name: str, info: EngineInfo, *, replaces: bool) -> None:
    """Raise INVALID where the name is taken and the adapter is not to be replaced."""
    if name in info.adapters and not replaces:
        raise invalid("lora_name", f"LoRA adapter {name!r} has already been loaded; load_inplace replaces it")


def check_known(name: str, info: EngineInfo) -> None:
    """Raise NOT_FOUND where there is no such adapter."""
    if name not in info.adapters:
        known = ", ".join(info.adapters) or "none"
        message = f"there is no LoRA adapter {name!r}; loaded: {known}"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_name")


def without_changed(config: EngineConfig, adapters: Mapping[str, str]) -> EngineConfig:
    """Return the configuration for another engine: without the adapters that were unloaded or replaced since.
    `adapters` has the folders of now, by name."""
    modules = config.lora_modules
    kept = {name: path for name, path in modules.items() if adapters.get(name) == path}
    return msgspec.structs.replace(config, lora_modules=kept, enable_lora=config.enable_lora or bool(modules))
