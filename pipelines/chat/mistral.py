"""Mistral's tool calls, in both forms."""

import string
from collections.abc import Sequence

from sluice.pipelines.chat.formats import NAME_CHARS, CallReader, Tool, ToolFormat, json_calls
from sluice.pipelines.chat.json_lists import JsonListReader
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.source import Steps
from sluice.repetition import random_text

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LENGTH = 9
_ID_CHARS = string.ascii_letters + string.digits


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
