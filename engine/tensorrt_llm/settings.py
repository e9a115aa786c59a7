"""Every setting of TensorRT-LLM that flags and config.pbtxt can make: one table of names, types, targets and versions.

`docs/tensorrt-llm.md` shows it (a test compares).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, by the name that `runtime_settings` has it under."""

    name: str
    target: str
    """The LLM argument, dotted into sub-configurations: `kv_cache_config.free_gpu_memory_fraction`."""
    parse: Callable[[str], Any]
    """Reads its text. Raises ValueError with what it must be."""
    help: str
    aliases: tuple[str, ...] = ()
    """Other names: tensorrtllm_backend's parameters, trtllm-serve's flags, vLLM's arguments."""
    since: str = ""
    """First version that has it, "" for all that are supported."""
    until: str = ""
    """First version that has it no more."""
    engines_only: bool = False
    """Whether only compiled engines have it (`_tensorrt_engine.LLM`)."""
    pytorch_only: bool = False


SETTINGS: Mapping[str, Setting] = {}
"""By name and by alias."""


def check_settings(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values by target. Raises SluiceError INVALID, naming the setting, what came and what was expected; an unknown
    name with those that are near."""
    raise NotImplementedError
