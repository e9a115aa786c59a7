"""Tool calls as a Python list of calls, as Llama 3.2 and 4 write them."""

import json
import math
import re
import sys
from collections.abc import Sequence
from functools import partial

from sluice.pipelines.chat.formats import NAME_CHARS, CallReader, Tool, ToolFormat, json_value
from sluice.pipelines.chat.lark import LarkWriter, escape
from sluice.pipelines.chat.schema_types import (
    alone,
    arguments_of,
    choices_of,
    parts_of,
    resolve,
    takes_any_argument,
    types_of,
)
from sluice.pipelines.chat.source import Steps, UnexpectedText
from sluice.pipelines.text.types import AnswerText, CallArguments

_START, _END = "<|python_start|>", "<|python_end|>"
_TEMPLATE = re.compile(r"\[\w+\(\w+=")
_IDENTIFIER = re.compile(r"\w*")
_WORD = re.compile(r"""[^,:()\[\]{}"'=]*""")
_HEX = frozenset("0123456789abcdefABCDEF")
_QUOTES = ('"', "'")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\n": "",
    **{each: each for each in ("\\", "'", '"', "/")},
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_BRACKETS = {"[": "]", "(": "]", "{": "}"}
_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}
_FREE_KEY = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"


class PythonicFormat(ToolFormat):
    """`[f(a=1, b="x"), g()]` in place of text, perhaps between `<|python_start|>` and `<|python_end|>`."""

    name = "pythonic"
    aliases = ("llama4_pythonic",)
    markers = (_START, _END)
    opening = "["

    def matches(self, template: str) -> bool:
        return _TEMPLATE.search(template) is not None

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _PythonicReader(self, tools)

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        first, *others = (self._call(tools, lark, before) for before in ("[", ", ")[: 1 + is_parallel])
        return " ".join([first, *(f"{other}*" for other in others), '"]"'])

    def _call(self, tools: Sequence[Tool], lark: LarkWriter, before: str) -> str:
        calls = (f'{lark.text(f"{before}{tool.name}(")} {_arguments(tool, lark)} ")"' for tool in tools)
        return lark.rule(" | ".join(calls))

    def required_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        calls = self.calls(tools, lark, is_parallel=is_parallel)
        return " ".join([lark.optional_token(_START), calls, lark.optional_token(_END)])

    def optional_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        text = lark.text_not_beginning(rf"\s*\[\s*({'|'.join(escape(tool.name) for tool in tools)})\(")
        return f"({text} | {self.required_calls(tools, lark, is_parallel=is_parallel)})"


class _PythonicReader(CallReader):
    def __init__(self, format: ToolFormat, tools: Sequence[Tool]) -> None:
        super().__init__(format)
        self._parameters = {tool.name: list(arguments_of(tool.parameters)[0]) for tool in tools}

    def steps(self) -> Steps[None]:
        self.source.mark()
        first = yield from self.source.skip_space()
        space = self.source.since_mark()
        if first == "[":
            yield from self.attempt(space, self._calls())
        elif space:
            yield AnswerText(space)
        while (yield from self.source.copy_until(_START)):
            yield from self.attempt(_START, self._calls())

    def check_name(self, name: str) -> None:
        """Only the names of tools tell calls from an answer that is a list."""
        if name not in self._parameters:
            raise UnexpectedText

    def _calls(self) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        yield from source.expect("[")
        separator = ","
        while separator == ",":
            yield from source.skip_space()
            name = yield from source.take_run(NAME_CHARS)
            self.check_name(name)
            yield from source.expect("(")
            yield self.begin(name)
            yield from self._arguments(self._parameters[name])
            source.mark()
            yield from source.skip_space()
            separator = yield from source.take_char()
        if separator != "]":
            raise UnexpectedText
        yield from source.skip_space()
        yield from source.starts_with(_END)
        yield from source.skip_space()

    def _arguments(self, parameters: Sequence[str]) -> Steps[None]:
        """Read arguments up to the closing parenthesis and yield them as JSON. Those without a name have the names of
        the `parameters` at their places."""
        source, index = self.source, self.num_calls - 1
        num_read = 0
        while (char := (yield from source.skip_space())) != ")":
            if not char:
                raise UnexpectedText
            if char == ",":
                yield from source.take_char()
                continue
            word = yield from source.take_run(_IDENTIFIER)
            key = ""
            if (yield from source.skip_space()) == "=":
                yield from source.take_char()
                key, word = word, ""
            elif num_read < len(parameters):
                key = parameters[num_read]
            yield CallArguments(index, f"{', ' if num_read else '{'}{json.dumps(key or str(num_read))}: ")
            num_read += 1
            yield from self._value(index, word)
        yield from source.take_char()
        yield CallArguments(index, "}" if num_read else "{}")

    def _value(self, index: int, word: str) -> Steps[None]:
        """Read a Python value, of which `word` was read already, and yield it as JSON. Raises UnexpectedText where the
        text ends within it."""
        source = self.source
        ends: list[str] = []
        comma = ""
        is_empty = not word
        if word:
            yield CallArguments(index, _word_in_json(word + (yield from source.take_run(_WORD))))
        while not ((char := (yield from source.skip_space())) in (",", ")") and not ends):
            if not char or (char in ")]}" and not ends):
                raise UnexpectedText
            if char in ")]}:,":
                yield from source.take_char()
                comma = ", " if char == "," else ""  # Python allows one more before the end
                if char != ",":
                    yield CallArguments(index, ": " if char == ":" else ends.pop())
                continue
            if comma:
                yield CallArguments(index, comma)
            comma, is_empty = "", False
            if char in _BRACKETS:
                ends.append(_BRACKETS[(yield from source.take_char())])
                yield CallArguments(index, "{" if char == "{" else "[")
            elif char in _QUOTES:
                yield from self._string(index)
            else:
                word = (yield from source.take_run(_WORD)) or (yield from source.take_char())
                yield CallArguments(index, _word_in_json(word))
        if is_empty:
            yield CallArguments(index, "null")

    def _string(self, index: int) -> Steps[None]:
        """Read a Python string and yield it as JSON. Raises UnexpectedText where the text ends within it."""
        source = self.source
        end = yield from source.take_char()
        yield CallArguments(index, '"')
        if (yield from source.starts_with(end)):
            if not (yield from source.starts_with(end)):
                yield CallArguments(index, '"')
                return
            end = end * 3
        while (mark := (yield from source.copy_until(end, "\\", make=partial(_string_part, index)))) == "\\":
            escaped = yield from source.take_char()
            digits = ""
            while len(digits) < _HEX_DIGITS.get(escaped, 0) and (yield from source.peek()) in _HEX:
                digits += yield from source.take_char()
            yield CallArguments(index, _escape_in_json(escaped, digits))
        if not mark:
            raise UnexpectedText
        yield CallArguments(index, '"')


def _string_part(index: int, text: str) -> CallArguments:
    return CallArguments(index, _in_json(text))


def _in_json(text: str) -> str:
    """Return text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escape_in_json(escaped: str, digits: str) -> str:
    """Return what a backslash, the character after it and hexadecimal digits stand for, within a JSON string."""
    if escaped in _HEX_DIGITS and len(digits) == _HEX_DIGITS[escaped]:
        code = int(digits, 16)
        if escaped != "U":
            return f"\\u{code:04x}"  # which may be half of a pair
        if code <= sys.maxunicode:
            return json.dumps(chr(code))[1:-1]
    return _in_json(_ESCAPES.get(escaped, f"\\{escaped}{digits}"))


def _word_in_json(word: str) -> str:
    """Return a number or a word as JSON; what is neither a number nor a constant of Python is a string."""
    word = word.strip()
    if word in _WORDS or _JSON_NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    for parse in (partial(int, base=0), float):
        try:
            number = parse(word)
        except ValueError:
            continue
        if math.isfinite(number):
            return json.dumps(number)
    return json.dumps(word, ensure_ascii=False)


# -- the grammar


def _arguments(tool: Tool, lark: LarkWriter) -> str:
    """Return the expression of a tool's arguments, in the order of its schema. Those not required may be left out."""
    properties, required = arguments_of(tool.parameters)
    if not properties:
        pair = lark.rule(f'{lark.pattern(_FREE_KEY)} "=" {lark.json({}, tool.name)}')
        return lark.rule(f'({pair} (", " {pair})*)?') if takes_any_argument(tool.parameters) else ""
    first, more = "", ""  # what may follow nothing yet, and what may follow an argument
    for name in reversed(properties):
        pair = lark.rule(f"{lark.text(name + '=')} {_value(properties[name], tool, lark)}")
        start = f"{pair} {more}"
        if name in required:
            first, more = start, lark.rule(f'", " {start}')
        else:
            first, more = f"({start} | {first})" if first else f"({start})?", lark.rule(f'(", " {pair})? {more}')
    return first


def _value(schema: object, tool: Tool, lark: LarkWriter, *, is_part: bool = False) -> str:
    """Return the expression of a value: constants alone as in Python, all else as in JSON."""
    root = tool.parameters
    resolved, types = resolve(schema, root), types_of(schema, root)
    if choices := choices_of(resolved):
        words = [str(each) if each is None or isinstance(each, bool) else json.dumps(each) for each in choices]
        return f"({' | '.join(map(lark.text, words))})"
    if not is_part and (parts := parts_of(resolved)):
        return f"({' | '.join(_value(part, tool, lark, is_part=True) for part in parts)})"
    if types and types <= _CONSTANTS.keys():
        return f"({' | '.join(_CONSTANTS[each] for each in sorted(types))})"
    if isinstance(resolved.get("type"), list) and "null" in types:
        rest = {**alone(resolved, root), "type": sorted(types - {"null"})}
        return f"({lark.json(rest, tool.name)} | {_CONSTANTS['null']})"
    return json_value(resolved, tool, lark)
