"""One row of the table of settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, by the name that `runtime_settings` has it under."""

    name: str
    target: str
    """The LLM argument, dotted into sub-configurations: `kv_cache_config.free_gpu_memory_fraction`. "" for what the
    adapter itself does, and for what has no effect."""
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
    no_effect: str = ""
    """Why giving it changes nothing, for parameters of other servers that have no meaning here."""
