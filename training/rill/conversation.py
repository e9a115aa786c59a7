"""The chat format: special tokens, chat template, and the weights of tokens in the loss."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

PAD, BOS, SYSTEM, USER, ASSISTANT, END = (
    "<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
SPECIAL_TOKENS = (PAD, BOS, SYSTEM, USER, ASSISTANT, END)  # ids are the positions
ANSWER_WEIGHT = 1.0
# Tools as signatures: `get_weather(city: string, unit?: celsius|fahrenheit): Get the weather in a city.` costs a third
# of the tokens of its JSON schema.
TOOL_LINES = (
    "Tools:{% for tool in tools %}{% set f = tool.function or tool %}{% set schema = f.parameters or {} %}"
    "{{ '\\n' + f.name }}({% for name, value in (schema.properties or {}).items() %}{{ ', ' if not loop.first }}"
    "{{ name }}{{ '?' if name not in (schema.required or []) }}: "
    "{% set type = value.enum or value.type or (value.anyOf or [{}])[0].type or 'any' %}"
    "{{ type if type is string else type | join('|') }}"
    "{% endfor %}){{ ': ' + f.description if f.description }}{% endfor %}"
)
CHAT_TEMPLATE = (
    "<|bos|>{% if tools %}<|system|>"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{{ '\\n\\n' }}{% endif %}"
    + TOOL_LINES
    + "<|end|>{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>' if loop.first or loop.previtem['role'] != 'tool' else '\\n' }}"
    "{{ '<tool_response>\\n' }}{{ message['content'] }}{{ '\\n</tool_response>' }}"
    "{{ '<|end|>' if loop.last or loop.nextitem['role'] != 'tool' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|{{ message['role'] }}|>{{ message['content'] if message['content'] is not none }}"
    "{% for call in message['tool_calls'] or [] %}{% set f = call.function or call %}"
    "{{ '\\n' if message['content'] or not loop.first }}"
    '{{ \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CALL = "<tool_call>"
_NAME = re.compile(r'(?<=\{"name": ")[^"]+')
_KEY_OR_END = re.compile(r'[{,] ?"[^"]+": "?[^ "{]|"?\}\}')  # a key with the beginning of its value
_tool_lines = Environment(autoescape=False).from_string(TOOL_LINES)

Tool = dict[str, Any]
"""A tool as OpenAI's API describes it."""


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Write a call as the chat template does."""
    content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"


def result_text(contents: Sequence[str]) -> str:
    """Write the results of calls as the chat template does."""
    return "\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in contents)


def choices(answer: str) -> list[tuple[int, int]] | None:
    """Return the spans of a call that choose: whether to call, the tool, each key, where its value begins, the end.

    None if the answer is no call.
    """
    if not answer.startswith(_CALL):
        return None
    return [(0, 2), *(found.span() for pattern in (_NAME, _KEY_OR_END) for found in pattern.finditer(answer))]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Questions with their answers.

    `prompt_weight` is the weight of a prompt token in the loss, where an answer token has 1: documentation in a prompt
    teaches English, invented facts do not. `choice_weight` is the weight of each of an answer's first tokens: they
    choose the passage, or decline, and the rest of a quote follows from them. In a call, `choices` has it.
    """

    turns: tuple[tuple[str, str], ...]
    system: str = ""
    prompt_weight: float = 0.1
    choice_weight: float = 1.0
    tools: tuple[Tool, ...] = ()

    def segments(self) -> list[tuple[str, float]]:
        """Return pieces of text with special tokens, each with its weight."""
        lines = _tool_lines.render(tools=self.tools) if self.tools else ""
        system = "\n\n".join(part for part in (self.system, lines) if part)
        opening = f"{BOS}{SYSTEM}{system}{END}" if system else BOS
        parts = [(opening, 0.0)]
        for question, answer in self.turns:
            parts += [(USER + question + END, self.prompt_weight), (ASSISTANT, 0.0), (answer + END, ANSWER_WEIGHT)]
        return parts

    def messages(self) -> list[dict[str, str]]:
        """Return the messages that an API client would send, without the last answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages[:-1]
