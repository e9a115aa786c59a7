"""Tool calls between marks of their own, in a section: DeepSeek and Kimi."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from sluice.pipelines.chat.formats import NAME_CHARS, CallReader, Tool, ToolFormat
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.source import Steps, UnexpectedText


class SectionMarks(NamedTuple):
    """The marks before all calls, before each, before its arguments, after it, and after all."""

    section: str
    call: str
    arguments: str
    end_call: str
    end_section: str


_DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")
_OPEN_FENCE, _CLOSE_FENCE = "```json", "```"


class _SectionFormat(ToolFormat):
    markers = _DEEPSEEK
    opening = _DEEPSEEK.section
    between = "\n"

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _DeepSeekReader(self)

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        marks = self.markers
        one = lark.rule(" | ".join(self.call(tool, lark) for tool in tools))
        call = lark.rule(" ".join([lark.text(marks.call), one, lark.text(marks.end_call)]))
        more = f"({lark.text(self.between)} {call})*" if is_parallel else ""
        return " ".join([call, more, lark.text(marks.end_section)])

    def call(self, tool: Tool, lark: LarkWriter) -> str:
        """Return the expression of a call between its marks."""
        raise NotImplementedError


class DeepSeekV3Format(_SectionFormat):
    """DeepSeek V3 and R1: a call is `function`, a mark, the function's name and its arguments in a code block."""

    name = "deepseek_v3"

    def matches(self, template: str) -> bool:
        return _DEEPSEEK.call in template and _OPEN_FENCE in template

    def call(self, tool: Tool, lark: LarkWriter) -> str:
        head = lark.text(f"function{_DEEPSEEK.arguments}{tool.name}\n{_OPEN_FENCE}\n")
        return " ".join([head, lark.json(tool.parameters, tool.name), lark.text(f"\n{_CLOSE_FENCE}")])


class DeepSeekV31Format(_SectionFormat):
    """DeepSeek V3.1: a call is the function's name, a mark and its arguments."""

    name = "deepseek_v31"
    between = ""

    def matches(self, template: str) -> bool:
        return _DEEPSEEK.call in template and _OPEN_FENCE not in template

    def call(self, tool: Tool, lark: LarkWriter) -> str:
        return f"{lark.text(tool.name + _DEEPSEEK.arguments)} {lark.json(tool.parameters, tool.name)}"


class KimiK2Format(_SectionFormat):
    """Kimi K2: a call is an id made of the function's name and a number, a mark and the arguments."""

    name = "kimi_k2"
    markers = _KIMI
    opening = _KIMI.section
    between = ""

    def matches(self, template: str) -> bool:
        return _KIMI.call in template

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _KimiReader(self)

    def call(self, tool: Tool, lark: LarkWriter) -> str:
        number = lark.pattern("[0-9]{1,4}")
        head = [lark.text(f"functions.{tool.name}:"), number, lark.text(_KIMI.arguments)]
        return " ".join([*head, lark.json(tool.parameters, tool.name)])

    def new_call_id(self, index: int, name: str) -> str:
        return f"functions.{name}:{index}"


class _SectionReader(CallReader):
    def __init__(self, format: _SectionFormat) -> None:
        super().__init__(format)
        self.marks = format.markers

    def steps(self) -> Steps[None]:
        marks = self.marks
        while mark := (yield from self.source.copy_until(marks.section, marks.call, marks.end_section)):
            if mark == marks.call:
                yield from self.attempt(mark, self._call())
            else:
                yield from self.source.skip_space()

    def _call(self) -> Steps[None]:
        source = self.source
        head, mark = yield from source.take_until(self.marks.arguments)
        if not mark:
            raise UnexpectedText
        yield from self.body(head.strip())
        yield from source.skip_space()
        yield from source.starts_with(self.marks.end_call)
        yield from source.skip_space()

    def body(self, head: str) -> Steps[None]:
        """Read what follows the mark before the arguments."""
        raise NotImplementedError


class _DeepSeekReader(_SectionReader):
    def body(self, head: str) -> Steps[None]:
        source = self.source
        name = (yield from source.take_run(NAME_CHARS)) or head
        yield from source.skip_space()
        has_fence = yield from source.starts_with(_OPEN_FENCE)
        yield from self.arguments_of(name)
        if has_fence:
            yield from source.skip_space()
            yield from source.starts_with(_CLOSE_FENCE)


class _KimiReader(_SectionReader):
    def body(self, head: str) -> Steps[None]:
        found = _KIMI_ID.fullmatch(head)
        if not found:
            raise UnexpectedText
        yield from self.arguments_of(found[1], head)
