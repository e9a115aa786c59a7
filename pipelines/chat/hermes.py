"""Hermes' and Qwen's tool calls: a JSON object between tags."""

import json
from collections.abc import Sequence

from pipelines.chat.formats import CallReader, Tool, ToolFormat
from pipelines.chat.lark import LarkWriter
from pipelines.chat.source import Steps
from pipelines.text.parts import AnswerText

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call."""

    name = "hermes"
    markers = (_OPEN, _CLOSE)
    opening = _OPEN

    def matches(self, template: str) -> bool:
        return _OPEN in template and '"arguments"' in template.replace("\\", "").replace("'", '"')

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _HermesReader(self)

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        heads = [(f'{{"name": {json.dumps(tool.name)}, "arguments": ', tool.parameters) for tool in tools]
        body = lark.rule(" | ".join(f"{lark.text(head)} {lark.json(schema)}" for head, schema in heads))
        call = lark.rule(" ".join([lark.text(f"{_OPEN}\n"), body, lark.text(f"}}\n{_CLOSE}")]))
        return f'{call} ("\\n" {call})*' if is_parallel else call


class _HermesReader(CallReader):
    def steps(self) -> Steps[None]:
        while (yield from self.source.copy_until(_OPEN)):
            if not (yield from self.attempt(self._call())):
                yield AnswerText(_OPEN)

    def _call(self) -> Steps[None]:
        yield from self.json_call()
        yield from self.source.skip_space()
        yield from self.source.starts_with(_CLOSE)
        yield from self.source.skip_space()
