"""vLLM's structural tags: text of which some parts, between tags, match schemas. Both shapes that vLLM takes."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.gbnf import is_gbnf, to_lark
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import invalid
from sluice.pipelines.chat.formats import Tool
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.tagged import Qwen3CoderFormat

_MAX_PARTS = 256
"""Most parts of a structural tag, at any depth."""
_MAX_CHARS = 1 << 18
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
"""Matches what is escaped in a regular expression, or a slash that is not, as it must be between slashes."""
_ANY = r"(.|\n)*"


class _Const(msgspec.Struct, tag_field="type", tag="const_string"):
    value: str


class _Json(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: dict[str, Any]


class _QwenParameters(msgspec.Struct, tag_field="type", tag="qwen_xml_parameter"):
    """The parameters of a call as Qwen 3 Coder writes them."""

    json_schema: dict[str, Any]


class _Gbnf(msgspec.Struct, tag_field="type", tag="grammar"):
    grammar: str


class _Regex(msgspec.Struct, tag_field="type", tag="regex"):
    pattern: str


class _AnyText(msgspec.Struct, tag_field="type", tag="any_text"):
    """Any text, up to the end of the tag that it is in."""


class _Sequence(msgspec.Struct, tag_field="type", tag="sequence"):
    elements: list["_Format"]


class _Choice(msgspec.Struct, tag_field="type", tag="or"):
    elements: list["_Format"]


class _Tag(msgspec.Struct, tag_field="type", tag="tag"):
    begin: str
    content: "_Format"
    end: str


class _Bare(msgspec.Struct):
    """A tag in a list of tags, which need no type."""

    begin: str
    content: "_Format"
    end: str


class _Triggered(msgspec.Struct, tag_field="type", tag="triggered_tags"):
    """Any text with tags in it: where it has a trigger, one of the tags that begin with it must follow."""

    triggers: list[str]
    tags: list[_Bare]
    at_least_one: bool = False
    stop_after_first: bool = False


class _Separated(msgspec.Struct, tag_field="type", tag="tags_with_separator"):
    tags: list[_Bare]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


_Format = (
    _Const | _Json | _QwenParameters | _Gbnf | _Regex | _AnyText | _Sequence | _Choice | _Tag | _Triggered | _Separated
)


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(msgspec.Struct):
    """The newer shape has a `format`, the older one `structures` and `triggers`."""

    format: _Format | None = None
    structures: list[_Structure] = []
    triggers: list[str] = []


def structural_tag_grammar(text: str, lark: LarkWriter) -> Grammar:
    """Return the grammar of a structural tag, which is given as JSON. Raises INVALID (param "grammar")."""
    if len(text) > _MAX_CHARS:
        message = f"the structural tag must have at most {_MAX_CHARS} characters, got {len(text)}"
        raise invalid("grammar", message)
    try:
        sent = msgspec.json.decode(text, type=_StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("grammar", f"the structural tag cannot be used: {error}") from None
    if (sent.format is None) == (not sent.structures):
        raise invalid("grammar", "the structural tag must have a format, or structures and triggers")
    tags = [_Bare(each.begin, _Json(each.schema), each.end) for each in sent.structures]
    format = _Triggered(sent.triggers, tags) if sent.format is None else sent.format
    return Grammar(GrammarKind.TOOL_CALLS, lark.grammar(_Writer(lark).write(format)))


class _Writer:
    """Writes formats as expressions of Lark."""

    def __init__(self, lark: LarkWriter) -> None:
        self._lark = lark
        self._num_parts = 0

    def write(self, format: _Format) -> str:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise invalid("grammar", f"the structural tag must have at most {_MAX_PARTS} parts")
        lark = self._lark
        match format:
            case _Const():
                return lark.text(format.value)
            case _Json():
                return lark.json(rewrite(format.json_schema).schema)
            case _QwenParameters():
                return self._parameters(format.json_schema)
            case _Gbnf():
                return self._grammar(format.grammar)
            case _Regex():
                return lark.pattern(_SLASH.sub(lambda match: match[1] or r"\/", format.pattern))
            case _AnyText():
                return lark.pattern(_ANY)
            case _Sequence():
                return " ".join(map(self.write, format.elements))
            case _Choice():
                return self._choice([self.write(each) for each in format.elements])
            case _Tag():
                return self._tag(format, "")
            case _Triggered():
                return self._triggered(format)
            case _Separated():
                return self._separated(format)

    def _parameters(self, schema: dict[str, Any]) -> str:
        if schema.get("type", "object") != "object":
            kind = str(schema["type"])[:40]
            raise invalid("grammar", f"qwen_xml_parameter needs a schema of the type 'object', got {kind!r}")
        tool = Tool("", rewrite({**schema, "type": "object"}).schema)
        return " ".join([r'"\n"?', *Qwen3CoderFormat().arguments(tool, self._lark)])

    def _grammar(self, text: str) -> str:
        if not is_gbnf(text):
            raise invalid("grammar", "a grammar in the structural tag must be in GBNF, where rules are defined by ::=")
        return self._lark.rule(f"%lark {{\n{to_lark(text).text}}}")

    def _choice(self, options: Sequence[str]) -> str:
        if not options:
            raise invalid("grammar", "the structural tag has an empty list of elements or tags")
        return self._lark.rule(" | ".join(option or '""' for option in options))

    def _tag(self, tag: _Tag | _Bare, head: str) -> str:
        """Return the expression of a tag of which `head` has been written."""
        begin = self._lark.text(tag.begin[len(head) :])
        if isinstance(tag.content, _AnyText) and tag.end:
            return f"{begin} {self._lark.text_before(tag.end)}"
        return f"{begin} {self.write(tag.content)} {self._lark.text(tag.end)}"

    def _triggered(self, format: _Triggered) -> str:
        by_head: dict[str, list[_Bare]] = {}
        for tag in format.tags:
            trigger = next((each for each in format.triggers if each and tag.begin.startswith(each)), None)
            if trigger is None:
                begin = repr(tag.begin[:40])
                raise invalid("grammar", f"the structural tag has a tag that begins with no trigger: {begin}")
            by_head.setdefault(self._lark.head_of(tag.begin, trigger), []).append(tag)
        first = self._choice([self._tag(tag, "") for tag in format.tags])
        found = self._choice(
            [
                f"{self._lark.text_before(head)} {self._choice([self._tag(tag, head) for tag in tags])}"
                for head, tags in by_head.items()
            ]
        )
        text = self._lark.pattern(_ANY)
        if format.stop_after_first:
            return first if format.at_least_one else f"({found} | {text})"
        return f"{first if format.at_least_one else ''} ({found})* {text}"

    def _separated(self, format: _Separated) -> str:
        tag = self._choice([self._tag(each, "") for each in format.tags])
        more = "" if format.stop_after_first else f"({self._lark.text(format.separator)} {tag})*"
        return f"{tag} {more}" if format.at_least_one else f"({tag} {more})?"
