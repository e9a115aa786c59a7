"""Tool calls as JSON objects, alone or in an array, behind a mark: Hermes, Qwen, Granite, Phi-4, Llama 3, Mistral."""

import json
import string
from collections.abc import Sequence
from typing import ClassVar

from sluice.pipelines.chat.formats import NAME_CHARS, CallReader, Tool, ToolFormat, json_calls
from sluice.pipelines.chat.lark import LarkWriter, escape
from sluice.pipelines.chat.source import Steps, UnexpectedText
from sluice.pipelines.text.types import AnswerText
from sluice.repetition import random_text

_PYTHON_TAG = "<|python_tag|>"
_OPENINGS = ("<|tool_call|>", "<tool_call>", "functools")
"""Marks before an array; models do not always write the one that their template asks for."""
_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LENGTH = 9
_ID_CHARS = string.ascii_letters + string.digits


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call."""

    name = "hermes"
    aliases = ("granite4",)
    markers = ("<tool_call>", "</tool_call>")
    opening = markers[0]

    def matches(self, template: str) -> bool:
        return self.opening in template and '"arguments"' in template.replace("\\", "").replace("'", '"')

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return JsonListReader(self, (self.opening,), self.markers[1])

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        call = " ".join(['"\\n"?', json_calls(tools, lark), '"\\n"?', lark.text(self.markers[1])])
        return f'{call} ("\\n"? {lark.text(self.opening)} {call})*' if is_parallel else call


class JsonListFormat(ToolFormat):
    """A mark, and an array of calls. `closing` may follow it."""

    closing: ClassVar[str] = ""

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return JsonListReader(self, _OPENINGS, self.closing)

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        call = json_calls(tools, lark)
        more = f'(", " {call})*' if is_parallel else ""
        return " ".join(["" if self.opening.endswith("[") else '"["', call, more, '"]"', lark.text(self.closing)])


class GraniteFormat(JsonListFormat):
    """`<|tool_call|>[{"name": "f", "arguments": {...}}, ...]`. Granite 4 writes as Hermes does."""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>")
    opening = "<|tool_call|>"

    def matches(self, template: str) -> bool:
        return self.opening in template


class PhiFormat(JsonListFormat):
    """`<|tool_call|>[{"name": "f", "arguments": {...}}, ...]<|/tool_call|>`."""

    name = "phi4"
    markers = ("<|tool_call|>", "<|/tool_call|>")
    opening = "<|tool_call|>"
    closing = "<|/tool_call|>"

    def matches(self, template: str) -> bool:
        return "<|/tool|>" in template or self.closing in template


class FunctoolsFormat(JsonListFormat):
    """`functools[{"name": "f", "arguments": {...}}, ...]`, for which some templates ask Phi-4 mini."""

    name = "phi4_mini_json"
    markers = PhiFormat.markers
    opening = "functools["

    def matches(self, template: str) -> bool:
        return "functools[" in template


class JsonListReader(CallReader):
    """Reads an object, an array of some or several between semicolons after any of the openings."""

    def __init__(self, format: ToolFormat, openings: Sequence[str], closing: str = "") -> None:
        super().__init__(format)
        self._openings = openings
        self._closing = closing

    def steps(self) -> Steps[None]:
        while opening := (yield from self.source.copy_until(*self._openings)):
            yield from self.attempt(opening, self.calls())

    def calls(self) -> Steps[None]:
        """Read what follows an opening."""
        source = self.source
        is_array = (yield from source.skip_space()) == "["
        if is_array:
            yield from source.expect("[")
        yield from self.json_call()
        while (yield from source.skip_space()) == ("," if is_array else ";"):
            yield from source.take_char()
            source.mark()
            yield from self.json_call()
        if is_array:
            yield from source.expect("]")
            yield from source.skip_space()
        if self._closing and (yield from source.starts_with(self._closing)):
            yield from source.skip_space()


class LlamaJsonFormat(ToolFormat):
    """`{"name": "f", "parameters": {...}}` in place of text, perhaps after `<|python_tag|>`; several of them with `; `
    between."""

    name = "llama3_json"
    aliases = ("llama4_json",)
    markers = (_PYTHON_TAG,)
    opening = '{"name": '

    def matches(self, template: str) -> bool:
        return '{"name": function name, "parameters":' in template.replace("\\", "")

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _LlamaJsonReader(self, [tool.name for tool in tools])

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        call = json_calls(tools, lark, "parameters")
        return f'{call} ("; " {call})*' if is_parallel else call

    def required_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        return f"{lark.optional_token(_PYTHON_TAG)} {self.calls(tools, lark, is_parallel=is_parallel)}"

    def optional_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        names = "|".join(escape(json.dumps(tool.name, ensure_ascii=False)) for tool in tools)
        text = lark.text_not_beginning(rf'\s*\{{\s*"name"\s*:\s*({names})')
        return f"({text} | {self.required_calls(tools, lark, is_parallel=is_parallel)})"


class _LlamaJsonReader(JsonListReader):
    def __init__(self, format: ToolFormat, names: Sequence[str]) -> None:
        super().__init__(format, (_PYTHON_TAG,))
        self._names = frozenset(names)

    def steps(self) -> Steps[None]:
        self.source.mark()
        first = yield from self.source.skip_space()
        space = self.source.since_mark()
        if first == "{":
            yield from self.attempt(space, self.calls())
        elif space:
            yield AnswerText(space)
        yield from super().steps()

    def check_name(self, name: str) -> None:
        """Only the names of tools tell a call from an answer in JSON."""
        if name not in self._names:
            raise UnexpectedText


class MistralFormat(ToolFormat):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, up to the tokenizers of version 7."""

    name = "mistral"
    markers = (_OPEN, _ID, _ARGUMENTS)
    opening = _OPEN

    def matches(self, template: str) -> bool:
        return _OPEN in template and _ARGUMENTS not in template

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _MistralReader(self, (_OPEN,))

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        call = json_calls(tools, lark)
        return " ".join(['" "? "["', call, f'(", " {call})*' if is_parallel else "", '"]"'])

    def new_call_id(self, index: int, name: str) -> str:
        """Return an id as Mistral's templates require it."""
        return random_text(_ID_CHARS, _ID_LENGTH)


class MistralNamesFormat(MistralFormat):
    """`[TOOL_CALLS]f[ARGS]{...}`, once for each call, perhaps with `[CALL_ID]` and an id after the name. Tokenizers of
    version 11 and later."""

    name = "mistral_v11"

    def matches(self, template: str) -> bool:
        return _OPEN in template and _ARGUMENTS in template

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        call_id = f"({lark.text(_ID)} {lark.pattern(f'[a-zA-Z0-9]{{{_ID_LENGTH}}}')})?"
        arguments = lark.text(_ARGUMENTS)
        heads = [f"{lark.text(tool.name)} {call_id} {arguments}" for tool in tools]
        values = [lark.json(tool.parameters, tool.name) for tool in tools]
        call = lark.rule(" | ".join(map(" ".join, zip(heads, values, strict=True))))
        return f"{call} ({lark.text(_OPEN)} {call})*" if is_parallel else call


class _MistralReader(JsonListReader):
    def calls(self) -> Steps[None]:
        source = self.source
        if (yield from source.skip_space()) in ("[", "{"):
            yield from super().calls()
            return
        name = yield from source.take_run(NAME_CHARS)
        call_id = (yield from source.take_run(NAME_CHARS)) if (yield from source.starts_with(_ID)) else ""
        yield from source.starts_with(_ARGUMENTS)
        yield from self.arguments_of(name, call_id)
        yield from source.skip_space()
