"""What the server gives the backends of language models: the engine's options, measurements and time limits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig, Runtime
from pipelines.text.types import TextEvent


class StreamRecord(Protocol):
    """The measurements of one LLM request: tokens, time to first token, gaps."""

    def observe(self, event: TextEvent) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def close(self) -> None: ...


OpenRecord = Callable[[str, str], StreamRecord]
"""Begins to measure a request, by model and protocol."""


class _NoRecord:
    """Measures nothing."""

    def observe(self, event: TextEvent) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def close(self) -> None: ...


def no_record(model: str, protocol: str) -> StreamRecord:
    """Measure nothing, where nobody reads it."""
    return _NoRecord()


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Time limits of requests to an LLM that name none themselves; None is no limit."""

    timeout_s: float | None = None
    queue_timeout_s: float | None = None


NO_LIMITS = RequestLimits()


def default_engine_config(model_path: str, runtime: Runtime | None = None) -> EngineConfig:
    """An engine's configuration without options of the command line."""
    return EngineConfig(model_path=model_path, runtime=runtime or Runtime.AUTO)


@dataclass(frozen=True, slots=True)
class LlmServices:
    """What a server gives its language models."""

    engine_config: Callable[[str, Runtime | None], EngineConfig] = default_engine_config
    """The command line's options for the checkpoint in that folder, on the runtime that its model names, if it does."""
    open_record: OpenRecord = no_record
    heartbeat_timeout_s: float = 10.0
    """An engine that says nothing for this long is replaced."""
    limits: RequestLimits = NO_LIMITS
