"""The formats that are installed, which of them a model's chat template speaks, and the reader of answers in them."""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sluice.errors import invalid
from sluice.pipelines.chat.formats import CallReader, ChatFormat, ReasoningFormat, Tool, ToolFormat
from sluice.pipelines.chat.harmony import HarmonyCallFormat, HarmonyReasoningFormat
from sluice.pipelines.chat.json_lists import (
    FunctoolsFormat,
    GraniteFormat,
    HermesFormat,
    LlamaJsonFormat,
    MistralFormat,
    MistralNamesFormat,
    PhiFormat,
)
from sluice.pipelines.chat.pythonic import PythonicFormat
from sluice.pipelines.chat.sections import DeepSeekV3Format, DeepSeekV31Format, KimiK2Format
from sluice.pipelines.chat.source import PartReader
from sluice.pipelines.chat.tagged import GlmFormat, Qwen3CoderFormat
from sluice.pipelines.chat.think import GraniteReasoningFormat, MagistralFormat, ThinkFormat
from sluice.pipelines.text.types import AnswerText, CallArguments, CallStart, ChatReader, Part, TextEvent, ToolChoice

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


class FormatReader:
    """The `ChatReader` of one answer in the formats of a model."""

    def __init__(
        self,
        open_reasoning: Callable[[str], PartReader] | None,
        calls: CallReader | None,
        *,
        choice: ToolChoice,
        relaxed: Callable[[], list[str]],
        shows_calls: bool = True,
    ) -> None:
        """`open_reasoning` takes the end of the prompt, which comes with the first event. Unless the `choice` allows
        it, calls after the first are left out: not every runtime keeps the model from making them. Where a call is
        required, all other text is a call that was cut off, and left out. `relaxed` says what calls are not held to.
        Unless `shows_calls`, all calls are left out: the client offers no tool that they could be for.
        """
        self._find_relaxed = relaxed
        self._open_reasoning = open_reasoning
        self._reasoning: PartReader | None = None
        self._calls = calls
        self._shows_calls = shows_calls
        self._is_parallel, self._has_text = choice.is_parallel, not choice.is_required
        self._token_starts: Sequence[int] = ()
        self._space: list[str] = []
        """White space at the end of the answer's text so far, which does not count in front of a call."""

    @property
    def finds_reasoning(self) -> bool:
        return self._open_reasoning is not None

    @property
    def relaxed(self) -> list[str]:
        return self._find_relaxed()

    @property
    def num_reasoning_tokens(self) -> int:
        passages = [] if self._reasoning is None else self._reasoning.reasoning
        return sum(self._count_tokens(*passage) for passage in passages)

    def _count_tokens(self, start: int, end: int) -> int:
        """Return how many tokens have characters in a passage, however they came in events."""
        starts = self._token_starts
        return bisect_left(starts, end) - max(bisect_right(starts, start) - 1, 0) if starts else 0

    def read(self, event: TextEvent) -> list[Part]:
        if event.detail is not None:
            self._token_starts = event.detail.token_starts
            if event.detail.prompt_end:
                self._open(event.detail.prompt_end)
        parts = self.feed(event.text) if event.text else []
        return parts if event.finish_reason is None else parts + self.finish()

    def feed(self, text: str) -> list[Part]:
        self._open("")
        reasoning = self._reasoning
        is_answer = reasoning is None or (reasoning.source.is_all_text and not reasoning.source.num_unread)
        return self._find_calls([AnswerText(text)] if reasoning is None or is_answer else reasoning.feed(text))

    def finish(self) -> list[Part]:
        self._open("")
        parts = self._find_calls([] if self._reasoning is None else self._reasoning.finish())
        if self._calls is not None:
            rest = self._calls.finish()
            if not self._shows_calls and any(self._is_call_cut_off(part) for part in rest):
                rest, self._space = [], []
            parts += self._hold_space(rest)
            if self._space:
                parts.append(AnswerText("".join(self._space)))
        return parts

    def _open(self, prompt_end: str) -> None:
        if self._reasoning is None and self._open_reasoning is not None:
            self._reasoning = self._open_reasoning(prompt_end)

    def _find_calls(self, parts: list[Part]) -> list[Part]:
        """Return the parts with the calls that the answer's text has."""
        if self._calls is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._hold_space(self._calls.feed(part.text)) if isinstance(part, AnswerText) else [part]
        return found

    def _is_call_cut_off(self, part: Part) -> bool:
        """Whether the last text is a call that ends before the name of its function."""
        return self._calls is not None and isinstance(part, AnswerText) and part.text.startswith(self._calls.opening)

    def _hold_space(self, parts: list[Part]) -> list[Part]:
        """Return the parts that the choice allows, without the white space in front of calls."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, CallStart | CallArguments) and part.index > 0 and not self._is_parallel:
                continue
            if isinstance(part, CallStart | CallArguments) and not self._shows_calls:
                self._space = []
                continue
            if isinstance(part, CallStart):
                self._space = []
            elif isinstance(part, AnswerText) and not self._has_text:
                continue
            elif isinstance(part, AnswerText):
                shown = part.text.rstrip()
                space = part.text[len(shown) :]
                if not shown:
                    self._space.append(space)
                    continue
                part = AnswerText("".join([*self._space, shown]))
                self._space = [space] if space else []
            found.append(part)
        return found


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
        tools: Sequence[Tool],
        *,
        choice: ToolChoice = _ANY_CALLS,
        relaxed: Callable[[], list[str]] = list,
        called: Sequence[str] = (),
    ) -> ChatReader:
        """Return a reader of one answer to a conversation with `tools`. It leaves out what
        the `choice` does not allow, and says what is `relaxed` in the tools' schemas. Without tools it leaves out calls
        of the functions that were `called` in the conversation. Raises INVALID for tools where the model has no format
        of calls."""
        calls = self._calls(tools) if tools else self._past_calls(called)
        open_reasoning = self.reasoning.reader if self.reasoning is not None else None
        return FormatReader(open_reasoning, calls, choice=choice, relaxed=relaxed, shows_calls=bool(tools))

    def _calls(self, tools: Sequence[Tool]) -> CallReader:
        if self.tools is None:
            message = "this model's chat template has no tool calls in a known format; leave out the tools"
            raise invalid("tools", message)
        return self.tools.reader(tools)

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
