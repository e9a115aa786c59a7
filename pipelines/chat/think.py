"""Reasoning before the answer, between tags or sentences: DeepSeek R1, Qwen 3 and many more, Magistral, Granite."""

from typing import ClassVar

from sluice.pipelines.chat.formats import ReasoningFormat
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.source import PartReader, Steps
from sluice.pipelines.text.types import AnswerText, ReasoningText


class ThinkFormat(ReasoningFormat):
    """`<think>...</think>` before the answer. The prompt may end with the first tag, or with both."""

    name = "think"
    aliases: ClassVar[tuple[str, ...]] = ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax_m2")
    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    marks: ClassVar[tuple[str, str] | None] = ("<think>", "</think>")
    openings: ClassVar[tuple[str, ...]] = markers[:1]
    closings: ClassVar[tuple[str, ...]] = markers[1:]
    """Texts that open and close the reasoning, the usual first."""

    def matches(self, template: str) -> bool:
        return self.closings[0] in template

    def reader(self, prompt_end: str) -> PartReader:
        return _ThinkReader(self, is_open=prompt_end.rstrip().endswith(self.openings))

    def preamble(self, prompt_end: str, lark: LarkWriter) -> str:
        if prompt_end.rstrip().endswith(self.closings):
            return ""
        return self._around(lark.text_before(self.closings[0]), prompt_end, lark)

    def limited_preamble(self, prompt_end: str, lark: LarkWriter, max_tokens: int) -> str:
        text = lark.limited_text_before(self.closings[0], max_tokens)
        return self._around(text, prompt_end, lark) if text else ""

    def _around(self, text: str, prompt_end: str, lark: LarkWriter) -> str:
        """Return the expression of reasoning with its marks, of which the prompt may have the first."""
        closing = " ".join([text, lark.pattern(r"\s*")])
        is_open = prompt_end.rstrip().endswith(self.openings)
        return closing if is_open else f"({lark.text(self.openings[0])} {closing})?"


class MagistralFormat(ThinkFormat):
    """`[THINK]...[/THINK]` before the answer."""

    name = "magistral"
    aliases = ("mistral",)
    markers = marks = ("[THINK]", "[/THINK]")
    openings, closings = markers[:1], markers[1:]


class GraniteReasoningFormat(ThinkFormat):
    """Granite 3's sentences before the reasoning and before the response."""

    name = "granite"
    aliases = ()
    markers, marks = (), None
    openings = ("Here is my thought process:", "Here's my thought process:")
    closings = ("Here is my response:", "Here's my response:")


class _ThinkReader(PartReader):
    def __init__(self, format: ThinkFormat, *, is_open: bool) -> None:
        super().__init__()
        self._format = format
        self._is_open = is_open

    def steps(self) -> Steps[None]:
        source = self.source
        source.mark()
        yield from source.skip_space()
        is_open = self._is_open
        for opening in self._format.openings:
            is_open = is_open or (yield from source.starts_with(opening))
        start = source.since_mark()
        if is_open:
            yield from source.skip_space()
            yield from source.copy_until(*self._format.closings, make=ReasoningText)
            yield from source.skip_space()
        elif start:
            yield AnswerText(start)
        yield from source.copy_until()
