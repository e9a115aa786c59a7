"""How families of models write tool calls and reasoning: what each of their formats says of itself."""

import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import msgspec

from sluice.engine.guidance.closing import Rewritten, rewrite
from sluice.engine.guidance.nodes import find, walk
from sluice.engine.guidance.relaxing import ANY_OBJECT, grammar_share, is_plain, relax
from sluice.engine.guidance.rewriting import Note, is_reference
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
_TOO_MUCH = Note("the schema is not enforced: those of all tools are too much for one grammar", "#")
_MAX_KEPT_BYTES = 4 << 20
"""Most bytes of JSON of the schemas that are kept. As values they take some ten times as much."""
_ROOT_REFERENCE = b'"$ref":"#"'
_FEW_TOOLS = 32
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call. `parameters` is the JSON schema of its arguments, an object's."""

    name: str
    parameters: dict[str, Any]
    relaxed: tuple[str, ...] = ()
    """Keywords of the client's schema that the grammar leaves out."""


def parse_tools(tools: Sequence[dict[str, Any]]) -> list[Tool]:
    """Return tools in OpenAI's form as values. One without parameters has no arguments. Unless a tool's `strict` is
    false, its arguments have no members that their schema does not name. What of a schema a grammar cannot keep to is
    left out, at most all of it. Raises INVALID for a strict tool whose calls cannot be held to all of its schema."""
    found = _last.find(tools)
    if found is None:
        functions = [tool["function"] for tool in tools]
        relaxed = map(_parsed.relax, functions, _affordable(functions))
        found = [_as_tool(*each) for each in zip(functions, relaxed, strict=True)]
        _last.keep(tools, found)
    return found


def tools_to_compile(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools whose schemas `parse_tools` compiles, a millisecond for a kilobyte: those are for a thread."""
    made = _affordable([tool["function"] for tool in tools])
    return [tool for tool, each in zip(tools, made, strict=True) if not each.is_sound]


def _as_tool(function: dict[str, Any], made: "KnownSchema") -> Tool:
    name = function["name"]
    if function.get("strict") is True and (broken := next(filter(_is_broken, made.notes), None)) is not None:
        reason = f"at {broken.pointer}: {broken.what}, as strict asks; leave it out, or send strict: false"
        raise invalid("tools", f"the JSON schema of the tool {name} cannot be used: {reason}")
    return Tool(name, made.schema, made.relaxed)


def _is_broken(note: Note) -> bool:
    return note.is_broken


class KnownSchema(NamedTuple):
    """The schema of a tool's arguments as its grammar keeps to it, and its share of what one grammar can have."""

    schema: dict[str, Any]
    notes: tuple[Note, ...]
    share: float = 0.0
    is_sound: bool = True
    """Whether it is known to compile."""
    relaxed: tuple[str, ...] = ()
    """The notes as text."""


_UNKEPT = KnownSchema(ANY_OBJECT, (_TOO_MUCH,), relaxed=(str(_TOO_MUCH),))


def _affordable(functions: Sequence[dict[str, Any]]) -> list[KnownSchema]:
    """Return the schemas of functions' arguments that one grammar can have together: in place of the largest, of tools
    that are not strict, any object where all are too much."""
    made = list(map(_parsed.rewrite, functions))
    total = sum(each.share for each in made)
    if total <= 1:
        return made
    kept = list(made)
    for index in sorted(range(len(made)), key=lambda index: -made[index].share):
        if total <= 1:
            break
        if functions[index].get("strict") is not True:
            total -= made[index].share
            kept[index] = _UNKEPT
    return kept


class _ParsedSchemas:
    """The schemas of tools that came last: agents send the same ones with each turn. Used from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, bool], KnownSchema] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def rewrite(self, function: dict[str, Any]) -> KnownSchema:
        """Return the schema of a function's arguments. It is shared: nobody may change it."""
        key = _key(function)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        schema, notes = _rewrite_object(_parameters(function), is_closed=key[1])
        made = KnownSchema(schema, notes, grammar_share(schema), is_plain(schema), tuple(map(str, notes)))
        return self._keep(key, made)

    def relax(self, function: dict[str, Any], made: KnownSchema) -> KnownSchema:
        """Return the schema without what cannot be compiled."""
        if made.is_sound:
            return made
        schema, notes = relax(Rewritten(made.schema, made.notes))
        known = KnownSchema(schema, notes, grammar_share(schema), relaxed=tuple(map(str, notes)))
        return self._keep(_key(function), known)

    def _keep(self, key: tuple[bytes, bool], made: KnownSchema) -> KnownSchema:
        with self._lock:
            self._num_bytes += 0 if key in self._known else len(key[0])
            self._known[key] = made
            while self._num_bytes > _MAX_KEPT_BYTES:
                self._num_bytes -= len(self._known.popitem(last=False)[0][0])
        return made


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or _NO_PARAMETERS


def _key(function: dict[str, Any]) -> tuple[bytes, bool]:
    """Return what the schema of a function's arguments depends on: its JSON, and whether it is closed."""
    return msgspec.json.encode(_parameters(function)), function.get("strict") is not False


def _rewrite_object(parameters: dict[str, Any], *, is_closed: bool) -> Rewritten:
    """Return the schema of an object as a grammar keeps to it; that of any object for one of something else."""
    target = find(parameters, parameters["$ref"]) if is_reference(parameters) else parameters
    kind = target.get("type", "object") if isinstance(target, dict) else "object"
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        return Rewritten(ANY_OBJECT, (Note(f"type {str(kind)[:40]!r}, which is no object's, is not enforced", "#"),))
    try:
        typed = parameters if target is not parameters else {**parameters, "type": "object"}
        schema, notes = rewrite(typed, is_closed=is_closed)
    except Exception:  # keywords of types that no draft has
        return Rewritten(ANY_OBJECT, (Note("the schema is not enforced: it is no JSON schema", "#"),))
    return Rewritten(_with_named_root(schema), notes)


def _with_named_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose parts are the same where they stand alone: what refers to all of it refers to a definition
    instead."""
    if _ROOT_REFERENCE not in msgspec.json.encode(schema):
        return schema
    copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    definitions = copy.pop("$defs", {})
    name = next(name for i in range(len(definitions) + 1) if (name := f"root{i}") not in definitions)
    whole = {**copy, "$defs": definitions}
    for _, node in walk(whole):
        if node.get("$ref") == "#":
            node["$ref"] = f"#/$defs/{name}"
    older = {"definitions": copy.pop("definitions")} if "definitions" in copy else {}
    return {"$ref": f"#/$defs/{name}", **older, "$defs": {**definitions, name: copy}}


class _LastTools:
    """The last long list of tools. A request asks several times for those of one list."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[dict[str, Any]], list[Tool]] = ((), [])

    def find(self, tools: Sequence[dict[str, Any]]) -> list[Tool] | None:
        last = self._last
        return last[1] if last[0] is tools else None

    def keep(self, tools: Sequence[dict[str, Any]], found: list[Tool]) -> None:
        if len(tools) > _FEW_TOOLS:
            self._last = tools, found


_parsed, _last = _ParsedSchemas(), _LastTools()


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

    def limited_preamble(self, prompt_end: str, lark: LarkWriter, max_tokens: int) -> str:
        """Return the expression of `preamble` with at most so many tokens of reasoning; "" where a grammar cannot limit
        it."""
        return ""

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
    heads = [(tool, f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ') for tool in tools]
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
