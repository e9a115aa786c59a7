"""Sleep: what workers do where `sleep_config` is set, as their sources and NVIDIA's tests tell."""

from typing import Any

from .settings import settings
from .worker import Worker

_NAMES = """sampler drafter guided_decoder spec_resource_manager model_extra executor_extra kv_cache model draft_model
model_weights draft_model_weights"""
_TAGS = frozenset(_NAMES.split())


class SleepState:
    """The memory that is away."""

    def __init__(self, args: Any) -> None:
        self._config = getattr(args, "sleep_config", None)
        self.parked: set[str] = set()

    def obey(self, worker: Worker, method: str, tags: list[str]) -> None:
        """Raises ValueError, and AttributeError for a method that workers do not have."""
        if settings().version != "1.4.0":
            raise ValueError("Executor type <class 'GenerationExecutorProxy'> does not support collective RPC.")
        if method not in ("sleep", "wakeup"):
            raise AttributeError(f"'GenerationExecutorWorker' object has no attribute '{method}'")
        if self._config is None:
            raise ValueError("Sleep feature is not enabled, please set sleep_config in the LLM arguments.")
        if unknown := {*tags} - _TAGS:
            raise ValueError(f"{unknown} is not a valid ExecutorMemoryType")
        if method == "wakeup":
            self.parked -= {*tags}
            return
        if self.parked:
            raise RuntimeError("memory is released already")
        self.parked = {*tags}  # from here on no request is admitted
        is_lost = "kv_cache" in tags and self._config.restore_modes.get("kv_cache", "NONE") in ("NONE", "MEMSET")
        worker.control(lambda cache: cache.lose_contents() if is_lost else None)
