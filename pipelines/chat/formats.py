"""How families of models write tool calls and reasoning: what each of their formats says of itself."""

import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar

import msgspec

from sluice.engine.guidance.closing import Rewritten, rewrite
from sluice.engine.guidance.rewriting import is_reference
from sluice.errors import invalid
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.schema_types import alone, number_regex
from sluice.pipelines.chat.source import PartReader, Steps, UnexpectedText
from sluice.pipelines.text.types import AnswerText, CallArguments, CallStart, ReasoningText
from sluice.repetition import random_hex

_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_BYTES = 12
NAME_CHARS = re.compile(r"[\w.:/-]*")
"""Characters of which the names of functions consist, more than OpenAI allows."""
_MAX_KEPT_BYTES = 2 << 20
"""Most bytes of JSON of the schemas that are kept. As values they take some ten times as much."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call. `parameters` is the JSON schema of its arguments, an object's."""

    name: str
    parameters: dict[str, Any]
    relaxed: tuple[str, ...] = ()
    """Keywords of the client's schema that the grammar leaves out."""


def parse_tools(tools: Sequence[dict[str, Any]]) -> list[Tool]:
    """Return tools in OpenAI's form as values. One without parameters has no arguments. Unless a tool's `strict` is
    false, its arguments have no members that their schema does not name. Raises INVALID for arguments that would be no
    object, and for a strict tool whose calls cannot be held to all of its schema."""
    return [_parse_tool(tool["function"]) for tool in tools]


def _parse_tool(function: dict[str, Any]) -> Tool:
    name, parameters, strict = function["name"], function.get("parameters") or _NO_PARAMETERS, function.get("strict")
    kind = parameters.get("type", "object")
    if kind != "object":
        message = f"the parameters of the tool {name} must have the type 'object', got {str(kind)[:40]!r}"
        raise invalid("tools", message)
    schema, notes = _parsed.rewrite(parameters, is_closed=strict is not False)
    if strict is True and (broken := next((note for note in notes if note.is_broken), None)) is not None:
        reason = f"at {broken.pointer}: {broken.what}, as strict asks; leave it out, or send strict: false"
        raise invalid("tools", f"the JSON schema of the tool {name} cannot be used: {reason}")
    return Tool(name, schema, tuple(map(str, notes)))


class _ParsedSchemas:
    """The schemas of tools that came last: agents send the same ones with each turn. Used from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, bool], Rewritten] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def rewrite(self, parameters: dict[str, Any], *, is_closed: bool) -> Rewritten:
        """Return an object's schema as its grammar keeps to it. It is shared: nobody may change it."""
        key = (msgspec.json.encode(parameters), is_closed)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        typed = parameters if is_reference(parameters) else {**parameters, "type": "object"}
        made = rewrite(typed, is_closed=is_closed)
        with self._lock:
            self._num_bytes += 0 if key in self._known else len(key[0])
            self._known[key] = made
            while self._num_bytes > _MAX_KEPT_BYTES:
                self._num_bytes -= len(self._known.popitem(last=False)[0][0])
        return made


_parsed = _ParsedSchemas()


class ChatFormat(ABC):
    """How one family of models writes, and how to recognise it. Formats have no state: all models share one."""

    name: ClassVar[str]
    """The name that operators give: vLLM's, where it has the format."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that operators may give."""
    markers: ClassVar[tuple[str, ...]]
    """The marks of the parts. Those that are special tokens are kept in the text for the reader."""

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Whether a chat template, or several in one text, is of a model that writes this format."""
        ...


class ToolFormat(ChatFormat):
    """How a family writes tool calls."""

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> "CallReader":
        """Return a reader of one answer's text, after its reasoning."""
        ...

    @property
    @abstractmethod
    def opening(self) -> str:
        """The text in front of the first call, which no other text may have: the grammar is triggered by it."""
        ...

    @abstractmethod
    def calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        """Return a Lark expression of what follows `opening`: the rest of a call of one of the tools, and where
        `is_parallel` of any number of them, with all that opens and closes them."""
        ...

    def required_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        """Return a Lark expression of an answer of calls alone."""
        return f"{lark.text(self.opening)} {self.calls(tools, lark, is_parallel=is_parallel)}"

    def optional_calls(self, tools: Sequence[Tool], lark: LarkWriter, *, is_parallel: bool) -> str:
        """Return a Lark expression of an answer of any text, which may end with calls."""
        text, text_and_opening = lark.text_without(self.opening), lark.text_before(self.opening)
        return f"({text} | {text_and_opening} {self.calls(tools, lark, is_parallel=is_parallel)})"

    def new_call_id(self, index: int, name: str) -> str:
        """Return the id of the call number `index` of an answer, by which its result is sent back."""
        return f"call_{random_hex(_ID_BYTES)}"


class ReasoningFormat(ChatFormat):
    """How a family writes the reasoning before its answer."""

    marks: ClassVar[tuple[str, str] | None] = None
    """Texts that open and close the reasoning, where the last alone ends it at any place."""

    @abstractmethod
    def reader(self, prompt_end: str) -> PartReader:
        """Return a reader of one answer's text, which follows the prompt that ends with `prompt_end`. It yields the
        reasoning as such and all other text, tool calls included, as the answer's."""
        ...

    @abstractmethod
    def preamble(self, prompt_end: str, lark: LarkWriter) -> str:
        """Return a Lark expression of what may, or must, stand before an answer that a grammar constrains; "" where the
        prompt already has it."""
        ...

    def text_head(self, lark: LarkWriter) -> str:
        """Return a Lark expression of what stands between the reasoning and an answer's text."""
        return ""

    def is_open(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt with this end begins within the reasoning."""
        return any(isinstance(part, ReasoningText) for part in self.reader(prompt_end).feed("."))


class CallReader(PartReader):
    """Reads the tool calls of one answer. What only looks like a call is text of the answer."""

    def __init__(self, format: ToolFormat) -> None:
        super().__init__()
        self._format = format
        self.num_calls = 0
        """Calls that have begun."""
        self._ids: set[str] = set()

    @property
    def opening(self) -> str:
        """The text in front of the first call."""
        return self._format.opening

    def attempt(self, opening: str, call: Steps[None]) -> Steps[None]:
        """Read a call after its `opening`. Where the text turns out to be none, yield it as the answer's. A call that
        has begun stays one."""
        self.source.mark()
        num_before = self.num_calls
        try:
            yield from call
        except UnexpectedText:
            text = self.source.since_mark()
            if self.num_calls == num_before:
                text = opening + text
            if text:
                yield AnswerText(text)
        self.source.since_mark()

    def begin(self, name: str, call_id: str = "") -> CallStart:
        """Return the beginning of the next call, with the id that the model gave it, or a new one where that is none or
        another call's."""
        self.source.since_mark()
        index, self.num_calls = self.num_calls, self.num_calls + 1
        ids = (call_id, self._format.new_call_id(index, name), ToolFormat.new_call_id(self._format, index, name))
        chosen = next(each for each in ids if each and each not in self._ids)
        self._ids.add(chosen)
        return CallStart(index, chosen, name)

    def copy_arguments(self) -> Steps[None]:
        """Read a JSON object and yield it as the arguments of the call that has begun."""
        index = self.num_calls - 1
        yield from self.source.copy_json(lambda piece: CallArguments(index, piece))
        self.source.mark()

    def arguments_of(self, name: str, call_id: str = "") -> Steps[None]:
        """Read a JSON object as the arguments of a new call."""
        self.check_name(name)
        if (yield from self.source.skip_space()) != "{":
            raise UnexpectedText
        yield self.begin(name, call_id)
        yield from self.copy_arguments()

    def check_name(self, name: str) -> None:
        """Raise UnexpectedText where this cannot be the name of a function. A reader may demand that it is a tool's."""
        if not name:
            raise UnexpectedText

    def json_call(self) -> Steps[None]:
        """Read a call that is a JSON object with the function's name and its arguments, in any order."""
        source, num_before = self.source, self.num_calls
        name = arguments = ""
        yield from source.skip_space()
        yield from source.expect("{")
        while (char := (yield from source.skip_space())) != "}":
            if char == ",":
                yield from source.expect(",")
                yield from source.skip_space()
            key = _decoded_text((yield from source.take_json()))
            yield from source.skip_space()
            yield from source.expect(":")
            first = yield from source.skip_space()
            if key == "name" and not name:
                name = _decoded_text((yield from source.take_json()))
            elif key not in _ARGUMENT_KEYS or arguments or self.num_calls > num_before:
                yield from source.take_json()
            elif name and first == "{":
                self.check_name(name)
                yield self.begin(name)
                yield from self.copy_arguments()
            else:
                arguments = yield from source.take_json()
        yield from source.expect("}")
        self.check_name(name)
        if self.num_calls == num_before:
            # Some models write the object as a string.
            text = _decoded_text(arguments) if arguments.startswith('"') else arguments
            yield self.begin(name)
            yield CallArguments(num_before, text or "{}")
            source.mark()


def json_value(schema: Mapping[str, Any], tool: Tool, lark: LarkWriter) -> str:
    """Return the expression of an argument that stands by itself as JSON. Small models write numbers that no grammar
    ends on and on; in objects the engine stops them."""
    regex = number_regex(schema)
    return lark.pattern(regex) if regex else lark.json(alone(schema, tool.parameters), tool.name)


def json_calls(tools: Sequence[Tool], lark: LarkWriter, key: str = "arguments") -> str:
    """Return the expression of a call that is a JSON object: the name of one of the tools, and under `key` its
    arguments."""
    heads = [(tool, f'{{"name": {json.dumps(tool.name)}, "{key}": ') for tool in tools]
    bodies = [f"{lark.text(head)} {lark.json(tool.parameters, tool.name)}" for tool, head in heads]
    body = lark.rule(" | ".join(bodies))
    return lark.rule(f'{body} "}}"')


def _decoded_text(text: str) -> str:
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()  # half a surrogate pair, which JSON can spell, is no text
    except (ValueError, RecursionError):
        raise UnexpectedText from None
    if not isinstance(value, str):
        raise UnexpectedText
    return value
