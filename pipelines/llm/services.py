"""Services that the server gives the backends of LLMs: engine options, measurement, time limits, settings of chats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.fleet.router import DEFAULT_ROUTING, RouterSettings
from sluice.pipelines.chat.registry import AUTO
from sluice.pipelines.text.stream import OpenRecord, no_record


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Time limits of requests to an LLM that have none of their own; None is no limit."""

    timeout_s: float | None = None
    queue_timeout_s: float | None = None


NO_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How the models of a server take conversations. The parsers are names of `sluice.pipelines.chat.registry`."""

    allows_special_tokens: bool = False
    """Whether messages that spell special tokens have them."""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    media_domains: tuple[str, ...] = ()
    """Hosts that images are fetched from, as `sluice.pipelines.text.images` reads them."""

    def with_parameters(self, texts: Mapping[str, str]) -> "ChatSettings":
        """Return the settings of a model with these parameters, which may name its parsers."""
        tools, reasoning = (texts.get(name, getattr(self, name)) for name in ("tool_call_parser", "reasoning_parser"))
        return replace(self, tool_call_parser=tools, reasoning_parser=reasoning)


DEFAULT_CHAT = ChatSettings()


@dataclass(frozen=True, slots=True)
class LlmServices:
    """The services of one server."""

    engine_config: Callable[[str, Runtime | None], EngineConfig] = lambda model_path, runtime: EngineConfig(
        model_path=model_path, runtime=runtime or Runtime.AUTO
    )
    """Returns the command line's options for the checkpoint in a folder, on the runtime that the model may name."""
    open_record: OpenRecord = no_record
    heartbeat_timeout_s: float = 10.0
    """An engine without a heartbeat for this long is replaced."""
    limits: RequestLimits = NO_LIMITS
    chat: ChatSettings = DEFAULT_CHAT
    routing: RouterSettings = DEFAULT_ROUTING
    """How the replica for a request is chosen where a model has several."""
    starts_engines: bool = True
    """Whether this process may start an engine; one that may not attaches to those of another."""
    choose_socket: Callable[[], Path | None] = lambda: None
    """Returns where the next engine lets other processes of the server attach to it; None for nowhere."""
