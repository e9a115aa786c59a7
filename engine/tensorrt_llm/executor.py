"""The adapter's loop: commands in, frames of token events out, as `engine.executor.InflightExecutor` does it."""

from collections.abc import Callable
from typing import Any

from engine.config import EngineConfig
from engine.frames import Command, StepFrame
from engine.types import EngineInfo


class TensorRtLlmExecutor:
    """Serves one `tensorrt_llm.LLM` on an event loop: queue, priorities, fair shares, deadlines and admission are ours,
    batching, KV cache and sampling are its own.
    """

    def __init__(self, llm: Any, info: EngineInfo, config: EngineConfig, emit: Callable[[StepFrame], None]) -> None:
        raise NotImplementedError

    def obey(self, commands: list[Command]) -> None:
        """On the event loop."""
        raise NotImplementedError

    async def run(self) -> None:
        """Until a Shutdown command. Raises what ends the engine: its supervisor starts another."""
        raise NotImplementedError
