"""The formats that are installed, and which of them a model's chat template speaks."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sluice.errors import invalid
from sluice.pipelines.chat.formats import CallReader, ChatFormat, ReasoningFormat, Tool, ToolFormat, parse_tools
from sluice.pipelines.chat.harmony import HarmonyCallFormat, HarmonyReasoningFormat
from sluice.pipelines.chat.json_lists import FunctoolsFormat, GraniteFormat, HermesFormat, LlamaJsonFormat, PhiFormat
from sluice.pipelines.chat.mistral import MistralFormat, MistralNamesFormat
from sluice.pipelines.chat.pythonic import PythonicFormat
from sluice.pipelines.chat.reader import FormatReader
from sluice.pipelines.chat.sections import DeepSeekV3Format, DeepSeekV31Format, KimiK2Format
from sluice.pipelines.chat.tagged import GlmFormat, Qwen3CoderFormat
from sluice.pipelines.chat.think import GraniteReasoningFormat, MagistralFormat, ThinkFormat
from sluice.pipelines.text.parts import ChatReader
from sluice.pipelines.text.types import ToolChoice

TOOL_GROUP = "sluice.tool_formats"
REASONING_GROUP = "sluice.reasoning_formats"
"""Groups of entry points of further formats, each a subclass of `ToolFormat` or `ReasoningFormat`."""
AUTO, NONE = "auto", "none"
"""Operators give these in place of a format's name: for the one that the template speaks, and for none."""

TOOL_FORMATS: tuple[type[ToolFormat], ...] = (
    HarmonyCallFormat,
    Qwen3CoderFormat,
    GlmFormat,
    KimiK2Format,
    DeepSeekV3Format,
    DeepSeekV31Format,
    MistralFormat,
    MistralNamesFormat,
    FunctoolsFormat,
    PhiFormat,
    GraniteFormat,
    HermesFormat,
    PythonicFormat,
    LlamaJsonFormat,
)
REASONING_FORMATS: tuple[type[ReasoningFormat], ...] = (
    HarmonyReasoningFormat,
    MagistralFormat,
    GraniteReasoningFormat,
    ThinkFormat,
)
"""The formats of this distribution, in the order in which they try to recognise a template."""

_ANY_CALLS = ToolChoice()

FormatT = TypeVar("FormatT", bound=ChatFormat)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """The formats of one model; None for those that it does not have."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The marks of the parts of an answer."""
        return tuple(marker for each in (self.tools, self.reasoning) if each is not None for marker in each.markers)

    def reader(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        choice: ToolChoice = _ANY_CALLS,
        relaxed: Callable[[], list[str]] = list,
        called: Sequence[str] = (),
    ) -> ChatReader:
        """Return a reader of one answer to a conversation with `tools`, as in `TemplateOptions`. It leaves out what
        the `choice` does not allow, and says what is `relaxed` in the tools' schemas. Without tools it leaves out calls
        of the functions that were `called` in the conversation. Raises INVALID for tools where the model has no format
        of calls."""
        calls = self._calls(tools) if tools else self._past_calls(called)
        open_reasoning = self.reasoning.reader if self.reasoning is not None else None
        return FormatReader(open_reasoning, calls, choice=choice, relaxed=relaxed, shows_calls=bool(tools))

    def _calls(self, tools: Sequence[dict[str, Any]]) -> CallReader:
        if self.tools is None:
            message = "this model's chat template has no tool calls in a known format; leave out the tools"
            raise invalid("tools", message)
        return self.tools.reader(parse_tools(tools))

    def _past_calls(self, called: Sequence[str]) -> CallReader | None:
        if self.tools is None or not called:
            return None
        return self.tools.reader([Tool(name, {"type": "object"}) for name in dict.fromkeys(called)])


NO_FORMATS = ChatFormats()
"""The formats of a model that answers with text alone."""


def find_formats(template: str, tools: str = AUTO, reasoning: str = AUTO) -> ChatFormats:
    """Return the formats of these names, or those that a chat template speaks. Raises INVALID for an unknown name."""
    return ChatFormats(
        _choose(tool_formats(), tools, template, "tool_call_parser"),
        _choose(reasoning_formats(), reasoning, template, "reasoning_parser"),
    )


@cache
def tool_formats() -> tuple[ToolFormat, ...]:
    """Return the installed formats of tool calls, those of other distributions first."""
    return tuple(kind() for kind in (*_installed(TOOL_GROUP, ToolFormat), *TOOL_FORMATS))


@cache
def reasoning_formats() -> tuple[ReasoningFormat, ...]:
    """Return the installed formats of reasoning, those of other distributions first."""
    return tuple(kind() for kind in (*_installed(REASONING_GROUP, ReasoningFormat), *REASONING_FORMATS))


def _installed(group: str, base: type[object]) -> Iterator[Any]:
    """Yield the classes of a group of entry points. One that cannot be loaded is left out and logged."""
    for entry_point in sorted(entry_points(group=group), key=lambda each: each.name):
        try:
            kind = entry_point.load()
            if not issubclass(kind, base):
                raise TypeError(f"it is not a subclass of {base.__name__}")
        except Exception:
            logger.exception("the chat format %s (%s) cannot be loaded", entry_point.name, entry_point.value)
        else:
            yield kind


def _choose(formats: Sequence[FormatT], name: str, template: str, param: str) -> FormatT | None:
    if name == NONE:
        return None
    if name == AUTO:
        found = [each for each in formats if each.matches(template)]
        return found[0] if found else None
    found = [each for each in formats if name in (each.name, *each.aliases)]
    if not found:
        names = ", ".join([AUTO, NONE, *(known.name for known in formats)])
        raise invalid(param, f"{param} must be one of {names}, got {name!r}")
    return found[0]
