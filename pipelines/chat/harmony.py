"""gpt-oss' messages: reasoning, text and tool calls are messages of an answer, each in its channel."""

import re
from collections.abc import Callable, Sequence

from sluice.pipelines.chat.formats import CallReader, ReasoningFormat, Tool, ToolFormat
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.source import PartReader, Steps, TextSource, UnexpectedText
from sluice.pipelines.text.types import AnswerText, CallArguments, ReasoningText

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_TO = " to="
_ENDS = (_END, _RETURN, _CALL, _START, _CHANNEL)
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")
_RECIPIENT = re.compile(rf"{_TO}([^\s<]+)")
_ASSISTANT = f"{_START}assistant"
_ANY = r"(.|\n)*"
_FINAL = f"{_CHANNEL}final{_MESSAGE}"


class HarmonyCallFormat(ToolFormat):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`. The last mark ends the answer,
    so it has one call."""

    name = "openai"
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS[:3])
    opening = f"{_CHANNEL}commentary{_TO}functions."

    def matches(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _HarmonyCallReader(self)

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        head = f" {_CONSTRAIN}json{_MESSAGE}"
        each = [f"{lark.text(tool.name + head)} {lark.json(tool.parameters)}" for tool in tools]
        return lark.rule(" | ".join(each))

    def optional_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        text = f"{lark.text(_FINAL)} {lark.pattern(_ANY)}"
        preamble = [lark.text(f"{_CHANNEL}commentary{_MESSAGE}"), lark.text_before(_END), lark.text(_ASSISTANT)]
        calls = self.required_calls(tools, lark, is_parallel=is_parallel)
        return f"(({' '.join(preamble)})? {calls} | {text})"


class HarmonyReasoningFormat(ReasoningFormat):
    """Messages in the channel `analysis` are reasoning; the marks of other messages with text are left out."""

    name = "openai_gptoss"
    markers = HarmonyCallFormat.markers

    def matches(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def reader(self, prompt_end: str) -> PartReader:
        return _HarmonyReader()

    def preamble(self, prompt_end: str, lark: LarkWriter) -> str:
        reasoning = [lark.text(f"{_CHANNEL}analysis{_MESSAGE}"), lark.text_before(_END)]
        return " ".join(["(", *reasoning, lark.text(_ASSISTANT), ")?"])

    def text_head(self, lark: LarkWriter) -> str:
        return lark.text(_FINAL)


class _HarmonyReader(PartReader):
    def steps(self) -> Steps[None]:
        yield from _read_messages(self.source, self._message)

    def _message(self, header: str) -> Steps[str]:
        if _ANALYSIS.search(header):
            return (yield from self.source.copy_until(*_ENDS, make=ReasoningText))
        recipient = _RECIPIENT.search(header)
        if recipient:  # a call, which the reader of calls gets as it is
            yield AnswerText(f"{_CHANNEL}commentary{_TO}{recipient[1]}{_MESSAGE}")
        end = yield from self.source.copy_until(*_ENDS)
        if recipient and end:
            yield AnswerText(_CALL)
        return end


class _HarmonyCallReader(CallReader):
    def steps(self) -> Steps[None]:
        yield from _read_messages(self.source, self._message)

    def _message(self, header: str) -> Steps[str]:
        source = self.source
        recipient = _RECIPIENT.search(header)
        if not recipient or _ANALYSIS.search(header):
            return (yield from source.copy_until(*_ENDS))
        yield self.begin(recipient[1].removeprefix("functions."))
        if (yield from source.skip_space()) == "{":
            try:
                yield from self.copy_arguments()
            except UnexpectedText:
                return ""
            source.since_mark()
            return (yield from source.copy_until(*_ENDS))
        text, end = yield from source.take_until(*_ENDS)
        yield CallArguments(self.num_calls - 1, text or "{}")
        return end


def _read_messages(source: TextSource, read_message: Callable[[str], Steps[str]]) -> Steps[None]:
    """Read messages, whose first the prompt has begun already. `read_message` takes a message's header, reads the rest
    and returns the mark after it. Text outside of messages is the answer's."""
    opening = _TO if (yield from source.starts_with(_TO)) else ""
    while opening or (opening := (yield from source.copy_until(_START, _CHANNEL))):
        header, mark = yield from source.take_until(_MESSAGE, _END, _RETURN, _CALL)
        if mark == _MESSAGE:
            end = yield from read_message(opening + header)
            opening = end if end in (_START, _CHANNEL) else ""
        else:
            yield AnswerText(opening + header + mark)
            opening = ""
