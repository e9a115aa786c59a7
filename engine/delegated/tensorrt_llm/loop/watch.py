"""Whether TensorRT-LLM still works: a loop that hangs answers nobody, and says nothing."""

from collections.abc import Mapping
from typing import Any

from engine.delegated.tensorrt_llm.loop.failures import EngineLost
from sluice.errors import invalid

STALL_SETTING = "stall_timeout_s"
STALL_TIMEOUT_S = 60.0
"""Longer than any step takes, the first one of a new shape included."""


def stall_timeout_s(settings: Mapping[str, str]) -> float:
    """What `runtime_settings` says of it. Raises SluiceError INVALID."""
    text = settings.get(STALL_SETTING, "")
    try:
        value = float(text) if text else STALL_TIMEOUT_S
    except ValueError:
        value = 0.0
    if not value > 0:
        raise invalid(STALL_SETTING, f"{STALL_SETTING} must be a number of seconds above 0, got {text!r}")
    return value


class Progress:
    """When something was last brought."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = timeout_s
        self._last = now

    def made(self, now: float) -> None:
        """A token, an end or an iteration came, or the first request came to an idle engine."""
        self._last = now

    def check(self, now: float) -> None:
        """Raises EngineLost after too long without. For while somebody waits for something."""
        silent_s = now - self._last
        if silent_s > self.timeout_s:
            raise EngineLost(
                f"TensorRT-LLM has brought no token and run no iteration for {silent_s:.1f} s ({STALL_SETTING})"
            )


def check_health(llm: Any) -> None:
    """Raises EngineLost where `llm` says that it is not well."""
    if not llm.is_healthy():
        raise EngineLost("TensorRT-LLM says that it is not healthy")
