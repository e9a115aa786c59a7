"""Tool calls whose arguments stand between tags, text as it is and all else as JSON: Qwen 3 Coder and GLM."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

from sluice.pipelines.chat.formats import NAME_CHARS, CallReader, Tool, ToolFormat, json_value
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.schema_types import (
    arguments_of,
    choices_of,
    parts_of,
    resolve,
    takes_any_argument,
    type_name,
    types_of,
)
from sluice.pipelines.chat.source import Steps, UnexpectedText
from sluice.pipelines.text.types import CallArguments

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TEXT = frozenset({"string"})
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ANY = r"(.|\n)*"
_FREE_KEY = "[a-zA-Z0-9_.-]{1,64}"


class Tags(NamedTuple):
    """The text of a call between its tags. A name stands where the braces are."""

    function: str
    key: str
    end_value: str
    after_value: str
    end_function: str


class _TaggedFormat(ToolFormat):
    markers: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    opening = _OPEN
    tags: ClassVar[Tags]

    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        one = lark.rule(" | ".join(self._call(tool, lark) for tool in tools))
        call = f"{one} {lark.text(self.tags.end_function + _CLOSE)}"
        return " ".join([call, "(", lark.text(f"\n{_OPEN}"), call, ")*"]) if is_parallel else call

    def _call(self, tool: Tool, lark: LarkWriter) -> str:
        return " ".join([lark.text(self.tags.function.format(tool.name)), *self.arguments(tool, lark)])

    def arguments(self, tool: Tool, lark: LarkWriter) -> list[str]:
        """Return the expressions of a call's arguments, which follow each other."""
        lark.json(tool.parameters, tool.name)  # in no other rule: for the errors, which name a place in it
        properties, required = arguments_of(tool.parameters)
        expressions = []
        for name, each in properties.items():
            argument = f"{lark.text(self.tags.key.format(name))} {self._value(each, tool, lark)}"
            expressions.append(argument if name in required else f"({argument})?")
        if takes_any_argument(tool.parameters):
            before, after = self.tags.key.split("{}")
            key = [lark.text(before), lark.pattern(_FREE_KEY), lark.text(after)]
            expressions.append(" ".join(["(", *key, self._value({}, tool, lark), ")*"]))
        return expressions

    def _value(self, schema: object, tool: Tool, lark: LarkWriter, *, is_part: bool = False) -> str:
        """Return the expression of a value and what follows it."""
        root = tool.parameters
        tags, resolved, types = self.tags, resolve(schema, root), types_of(schema, root)
        newline = r"\n" if tags.key.endswith("\n") else ""
        closing = lark.text(("\n" if newline else "") + tags.end_value + tags.after_value)
        if choices := choices_of(resolved):
            words = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in choices]
            return f"({' | '.join(map(lark.text, words))}) {closing}"
        if not is_part and (parts := parts_of(resolved)):
            return f"({' | '.join(self._value(part, tool, lark, is_part=True) for part in parts)})"
        if "string" not in types:
            return f"{json_value(resolved, tool, lark)} {closing}"
        regex = f"({_text_regex(resolved)}){newline}" if types == _TEXT else _ANY
        return " ".join([lark.text_before(tags.end_value, regex), lark.text(tags.after_value)])


class Qwen3CoderFormat(_TaggedFormat):
    """`<tool_call><function=f><parameter=a>...</parameter></function></tool_call>`, each tag and value on its line."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    tags = Tags("\n<function={}>\n", "<parameter={}>\n", "</parameter>", "\n", "</function>\n")

    def matches(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _Qwen3CoderReader(self, tools)


class GlmFormat(_TaggedFormat):
    """`<tool_call>f`, `<arg_key>a</arg_key>` and `<arg_value>...</arg_value>` for each argument, `</tool_call>`."""

    name = "glm45"
    aliases = ("glm47",)
    markers = (_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tags = Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "\n", "")

    def matches(self, template: str) -> bool:
        return "<arg_key>" in template

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _GlmReader(self, tools)


class _TaggedReader(CallReader):
    openings: ClassVar[tuple[str, ...]] = (_OPEN,)
    ends: ClassVar[tuple[str, ...]] = (_CLOSE,)
    end_values: ClassVar[tuple[str, ...]]

    def __init__(self, format: ToolFormat, tools: Sequence[Tool]) -> None:
        super().__init__(format)
        self._schemas = {tool.name: tool.parameters for tool in tools}

    @abstractmethod
    def function(self, opening: str) -> Steps[str]:
        """Read the beginning of a call and return its function's name."""
        ...

    @abstractmethod
    def key(self) -> Steps[str]:
        """Read to the beginning of the next argument's value, and return its name; "" where no argument follows."""
        ...

    def steps(self) -> Steps[None]:
        while opening := (yield from self.source.copy_until(*self.openings)):
            yield from self.attempt(opening, self._call(opening))

    def _call(self, opening: str) -> Steps[None]:
        source = self.source
        name = yield from self.function(opening)
        self.check_name(name)
        yield from source.skip_space()
        key = yield from self.key()
        is_closed = False if key else (yield from self._end())
        if not key and not is_closed:
            raise UnexpectedText
        yield self.begin(name)
        index, before = self.num_calls - 1, "{"
        root = self._schemas.get(name, {})
        properties, _ = arguments_of(root)
        while key:
            yield CallArguments(index, f"{before}{_quoted(key)}: ")
            yield from self._value(index, types_of(properties.get(key), root))
            before = ", "
            yield from source.skip_space()
            source.mark()
            key = yield from self.key()
        yield CallArguments(index, "{}" if before == "{" else "}")
        source.mark()
        if not is_closed:
            yield from self._end()

    def _end(self) -> Steps[bool]:
        """Read the tags after a call. Return whether there was one."""
        is_closed = False
        for tag in self.ends:
            yield from self.source.skip_space()
            if (yield from self.source.starts_with(tag)):
                is_closed = True
        yield from self.source.skip_space()
        return is_closed

    def _value(self, index: int, types: frozenset[str]) -> Steps[None]:
        """Read a value and yield it as JSON. Raises UnexpectedText where the text ends within it."""
        source = self.source
        if self.end_values[0].startswith("\n"):
            yield from source.starts_with("\n")
        if types != _TEXT:
            text, mark = yield from source.take_until(*self.end_values)
            yield CallArguments(index, _to_json(text, types) if mark else text)
        else:
            yield CallArguments(index, '"')
            mark = yield from source.copy_until(
                *self.end_values, make=lambda piece: CallArguments(index, _quoted(piece)[1:-1])
            )
            if mark:
                yield CallArguments(index, '"')
        source.since_mark()
        if not mark:
            raise UnexpectedText


class _Qwen3CoderReader(_TaggedReader):
    openings = (_OPEN, "<function=")
    ends = ("</function>", _CLOSE)
    end_values = ("\n</parameter>", "</parameter>")

    def function(self, opening: str) -> Steps[str]:
        if opening == _OPEN:
            yield from self.source.skip_space()
            yield from self.source.expect("<function=")
        return (yield from self._tag_end())

    def key(self) -> Steps[str]:
        return (yield from self._tag_end()) if (yield from self.source.starts_with("<parameter=")) else ""

    def _tag_end(self) -> Steps[str]:
        name, mark = yield from self.source.take_until(">", "<", "\n")
        if mark != ">" or not name.strip():
            raise UnexpectedText
        return name.strip()


class _GlmReader(_TaggedReader):
    end_values = ("</arg_value>",)

    def function(self, opening: str) -> Steps[str]:
        yield from self.source.skip_space()
        return (yield from self.source.take_run(NAME_CHARS))

    def key(self) -> Steps[str]:
        source = self.source
        if not (yield from source.starts_with("<arg_key>")):
            return ""
        key, _ = yield from source.take_until("</arg_key>")
        yield from source.skip_space()
        yield from source.expect("<arg_value>")
        if not key.strip():
            raise UnexpectedText
        return key.strip()


def _text_regex(schema: Mapping[str, Any]) -> str:
    """Return the regular expression of a text that a schema allows, as Lark has it between slashes."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        from llguidance import regex_to_lark  # 40 ms that only these schemas need

        start, end = "" if pattern.startswith("^") else _ANY, "" if pattern.endswith("$") else _ANY
        return f"{start}({regex_to_lark(pattern.removeprefix('^').removesuffix('$'), use_ascii='d')}){end}"
    if "minLength" in schema or "maxLength" in schema:
        return rf"(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return _ANY


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _to_json(text: str, types: frozenset[str]) -> str:
    """Return a value of one of the types as JSON: as it is where that is JSON of such a type, else as a string."""
    for written in (text.strip(), _PYTHON_WORDS.get(text.strip(), "")):
        try:
            name = type_name(json.loads(written, parse_constant=_refuse))
        except (ValueError, RecursionError):
            continue
        if name != "string" and (name in types or (name == "integer" and "number" in types)):
            return written
    return _quoted(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
