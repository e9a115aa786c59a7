"""Reasoning between think tags, as DeepSeek R1 and Qwen 3 write it."""

from pipelines.chat.formats import ReasoningFormat
from pipelines.chat.lark import LarkWriter
from pipelines.chat.source import PartReader, Steps
from pipelines.text.parts import AnswerText, ReasoningText

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkFormat(ReasoningFormat):
    """`<think>...</think>` before the answer. The prompt may end with the first tag, or with both."""

    name = "think"
    aliases = ("deepseek_r1", "deepseek_v3", "qwen3", "glm45")
    markers = (_OPEN, _CLOSE)

    def matches(self, template: str) -> bool:
        return _CLOSE in template

    def reader(self, prompt_end: str) -> PartReader:
        return _ThinkReader(prompt_end)

    def preamble(self, prompt_end: str, lark: LarkWriter) -> str:
        if prompt_end.rstrip().endswith(_CLOSE):
            return ""
        closing = " ".join([lark.text_before(_CLOSE), lark.pattern(r"\n*")])
        return closing if prompt_end.rstrip().endswith(_OPEN) else f"({lark.text(_OPEN)} {closing})?"


class _ThinkReader(PartReader):
    def __init__(self, prompt_end: str) -> None:
        super().__init__()
        self._is_open = prompt_end.rstrip().endswith(_OPEN)

    def steps(self) -> Steps[None]:
        source = self.source
        source.mark()
        yield from source.skip_space()
        is_open = self._is_open or (yield from source.starts_with(_OPEN))
        start = source.since_mark()
        if is_open:
            yield from source.skip_space()
            yield from source.copy_until(_CLOSE, make=ReasoningText)
            yield from source.skip_space()
        elif start:
            yield AnswerText(start)
        yield from source.copy_until()
