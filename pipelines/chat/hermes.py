"""Hermes' and Qwen's tool calls: a JSON object between tags."""

import json
from collections.abc import Sequence

from pipelines.chat.formats import CallReader, Tool, ToolFormat
from pipelines.chat.lark import LarkWriter
from pipelines.chat.source import Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call."""

    name = "hermes"
    aliases = ("granite4",)
    markers = (_OPEN, _CLOSE)
    opening = _OPEN

    def matches(self, template: str) -> bool:
        return _OPEN in template and '"arguments"' in template.replace("\\", "").replace("'", '"')

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _HermesReader(self)

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        heads = [(tool, f'{{"name": {json.dumps(tool.name)}, "arguments": ') for tool in tools]
        body = lark.rule(
            " | ".join(f"{lark.text(head)} {lark.json(tool.parameters, tool.name)}" for tool, head in heads)
        )
        call = lark.rule(" ".join([lark.text("\n"), body, lark.text(f"}}\n{_CLOSE}")]))
        return " ".join([call, "(", lark.text(f"\n{_OPEN}"), call, ")*"]) if is_parallel else call


class _HermesReader(CallReader):
    def steps(self) -> Steps[None]:
        while (yield from self.source.copy_until(_OPEN)):
            yield from self.attempt(_OPEN, self._call())

    def _call(self) -> Steps[None]:
        yield from self.json_call()
        yield from self.source.skip_space()
        yield from self.source.starts_with(_CLOSE)
        yield from self.source.skip_space()
