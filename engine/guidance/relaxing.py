"""Makes any schema of an object one that compiles: a part at fault becomes any value, with a note."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.engine.guidance.closing import Rewritten
from sluice.engine.guidance.nodes import ANNOTATIONS, children_of, escape, find, names_in, unescape, walk
from sluice.engine.guidance.rewriting import Note
from sluice.engine.guidance.schema import SchemaFault, find_fault, locate_error

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of an object of which nothing else is known."""
_MAX_FAULTS = 8
"""Faults of one schema that are mended one by one. With more it becomes `ANY_OBJECT`."""
_FREE_BYTES = 16 << 10
"""Bytes that may be compiled for a schema besides four times its own. A kilobyte takes about a millisecond."""
_MAX_REASON_CHARS = 120
_MAIN_KEYWORDS = ("type", "properties")
"""Keywords that are left out only where no other can be."""
_TOGETHER = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
}
"""Keywords that would permit less without another one, with those that are left out besides."""
_DEFINITIONS = ("$defs", "definitions")

# --- schemas that need no compiler to be known as sound

_PLAIN_DEPTH, _PLAIN_NODES = 30, 1000
_MAX_COUNT = 1 << 16
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MAX_OPTIONAL = 400
"""Most members of an object that may be left out: llguidance has 2,000 items for all that may come next, 4 for one."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum")
_DRAFT = re.compile(r"https?://json-schema\.org/draft(-0[4-7]|/20(19-09|20-12))/schema#?")


def is_plain(schema: dict[str, Any]) -> bool:
    """Whether a rewritten schema consists of keywords that cannot contradict each other, in their own types. All others
    are compiled to see whether they can be used."""
    num_nodes, depth = 0, 0
    level: list[Any] = [schema]
    while level:
        num_nodes, depth = num_nodes + len(level), depth + 1
        if num_nodes > _PLAIN_NODES or depth > _PLAIN_DEPTH or not all(map(_is_plain_node, level)):
            return False
        level = [child for node in level if isinstance(node, dict) for child in _children(node)]
    return True


def _children(node: dict[str, Any]) -> list[Any]:
    rest = [node[key] for key in ("items", "additionalProperties") if node.get(key, False) is not False]
    return [*node.get("properties", {}).values(), *node.get("anyOf", ()), *rest]


def _is_plain_node(node: Any) -> bool:
    if not isinstance(node, dict):
        return node is True
    if not all(key in _PLAIN and _PLAIN[key](value, node) for key, value in node.items() if key not in ANNOTATIONS):
        return False
    return isinstance(draft := node.get("$schema", ""), str) and (not draft or _DRAFT.fullmatch(draft) is not None)


def _is_plain_type(value: Any, node: dict[str, Any]) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _are_plain_members(value: Any, node: dict[str, Any]) -> bool:
    return isinstance(value, dict) and len(value) <= _MAX_OPTIONAL


def _are_plain_names(value: Any, node: dict[str, Any]) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return "additionalProperties" not in node or set(value) <= node.get("properties", {}).keys()


def _is_plain_rest(value: Any, node: dict[str, Any]) -> bool:
    return value is False or isinstance(value, dict) or value is True


def _is_plain_element(value: Any, node: dict[str, Any]) -> bool:
    return isinstance(value, dict) or value is True


def _are_plain_choices(value: Any, node: dict[str, Any]) -> bool:
    is_text = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
    return is_text and node.get("type", "string") == "string" and node.keys() - ANNOTATIONS <= {"enum", "type"}


def _are_plain_options(value: Any, node: dict[str, Any]) -> bool:
    return isinstance(value, list) and bool(value) and node.keys() - ANNOTATIONS == {"anyOf"}


def _is_plain_count(value: Any, node: dict[str, Any]) -> bool:
    is_alone = sum(key in node for key in _COUNTS) == 1
    return type(value) is int and 0 <= value <= _MAX_COUNT and is_alone and "format" not in node


def _is_plain_bound(value: Any, node: dict[str, Any]) -> bool:
    found = [node[key] for key in _BOUNDS if key in node]
    low, high = node.get("minimum", value), node.get("maximum", value)
    return all(type(each) is int for each in found) and bool(low <= high)


def _is_plain_format(value: Any, node: dict[str, Any]) -> bool:
    return isinstance(value, str)


_PLAIN: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "type": _is_plain_type,
    "properties": _are_plain_members,
    "required": _are_plain_names,
    "additionalProperties": _is_plain_rest,
    "items": _is_plain_element,
    "enum": _are_plain_choices,
    "anyOf": _are_plain_options,
    "format": _is_plain_format,
    **dict.fromkeys(_COUNTS, _is_plain_count),
    **dict.fromkeys(("minimum", "maximum"), _is_plain_bound),
}

# --- what schemas cost

_MOST_NODES, _MOST_BYTES = 6000, 384 << 10
"""Schemas in one grammar, and their bytes of JSON, of which the compiler takes any. It has 8 symbols for one of 65,000,
and half as many more for an object with other members than it names."""
_NODES_OF_FORMAT, _CHARS_OF_NODE, _CHOICES_OF_NODE = 8, 30, 6
"""Schemas that a format costs as much as, and characters of a pattern and values of an enum that cost as much as one
schema: they become regular expressions, of which a grammar can have half a million steps."""


def grammar_share(schema: dict[str, Any]) -> float:
    """Return the share of what one grammar can have that the schema of a tool's arguments takes."""
    num_nodes = 0.5
    for _, node in walk(schema):
        patterns = [node.get("pattern"), *(inner if isinstance(inner := node.get("patternProperties"), dict) else ())]
        num_chars = sum(len(each) for each in patterns if isinstance(each, str))
        is_open = "properties" in node and node.get("additionalProperties") is not False
        num_choices = len(choices) if isinstance(choices := node.get("enum"), list) else 0
        num_nodes += 1 + 0.5 * is_open + _NODES_OF_FORMAT * ("format" in node)
        num_nodes += num_chars / _CHARS_OF_NODE + num_choices / _CHOICES_OF_NODE
    return max(num_nodes / _MOST_NODES, len(msgspec.json.encode(schema)) / _MOST_BYTES)


# --- parts at fault


def relax(sent: Rewritten) -> Rewritten:
    """Return a rewritten schema of an object without what its grammar cannot have, and a note of each such part. What
    matches before matches afterwards. It compiles the schema, without the interpreter's lock: not for an event loop."""
    work = _Relaxing(sent).run
    if _is_shallow(sent.schema):
        return work()
    from sluice.engine.guidance.compiler import call_with_large_stack

    return call_with_large_stack(work)


def _is_shallow(schema: dict[str, Any]) -> bool:
    """Whether the compiler, which recurses, can do with the stack of any thread."""
    return all(pointer.count("/") < 2 * _PLAIN_DEPTH and "$ref" not in node for pointer, node in walk(schema))


class _Relaxing:
    def __init__(self, sent: Rewritten) -> None:
        text = msgspec.json.encode(sent.schema)
        self._schema: dict[str, Any] = msgspec.json.decode(text)
        self._notes = list(sent.notes)
        self._bytes_left = 4 * len(text) + _FREE_BYTES

    def run(self) -> Rewritten:
        if self._schema.pop("x-guidance", None) is not None:
            self._notes.append(Note("x-guidance is not enforced", "#"))
        for _ in range(_MAX_FAULTS):
            fault = self._find_fault()
            if fault is None:
                break
            what, pointer = self._mend(fault.pointer)
            self._notes.append(Note(f"{what} is not enforced: {fault.reason[:_MAX_REASON_CHARS]}", pointer))
            if self._schema is ANY_OBJECT:
                break
        else:
            self._schema = ANY_OBJECT
            self._notes.append(Note("the schema is not enforced: too much of it cannot be used", "#"))
        return Rewritten({**ANY_OBJECT, **self._schema}, tuple(self._notes))

    def _find_fault(self) -> SchemaFault | None:
        """Return the innermost part at fault."""
        from sluice.engine.guidance.translate import reword_error

        try:
            if (fault := _fault_by_itself(self._schema)) is not None:
                return fault
            bounded = _bounded(self._schema)
            error = _compile_error(bounded)
            fault = locate_error(bounded, error, self._probe) if error else self._find_odd_argument(bounded)
            return None if fault is None else SchemaFault(fault.pointer, reword_error(fault.reason))
        except Exception:  # keywords of types that no draft has
            return SchemaFault("#", "it is no JSON schema")

    def _find_odd_argument(self, schema: dict[str, Any]) -> SchemaFault | None:
        """Return an argument that nothing can match, or an option of one. An object may do without, but some formats of
        calls have a grammar for each."""
        shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        properties = schema.get("properties", {})
        nodes = {f"#/properties/{escape(name)}": node for name, node in properties.items() if isinstance(node, dict)}
        options = {to: each for place, node in nodes.items() for to, each in children_of(place, node)}
        for pointer, node in {**nodes, **options}.items():
            if isinstance(node, dict) and not is_plain(node) and (error := _compile_error({**shared, **node})):
                return SchemaFault(pointer, error)
        return None

    def _probe(self, part: dict[str, Any]) -> str:
        """Return the error of a part, none where no more may be compiled."""
        self._bytes_left -= len(msgspec.json.encode(part))
        return "" if self._bytes_left < 0 else _compile_error(part)

    def _mend(self, pointer: str) -> tuple[str, str]:
        """Leave a keyword out of the schema at a pointer, or of the innermost one around it. Where that does not do,
        let it match anything. Return what was left out, and the schema's pointer."""
        places = set(_places(self._schema))
        while pointer not in places:
            pointer = pointer.rpartition("/")[0] or "#"
        node = find(self._schema, pointer)
        if isinstance(node, dict) and (key := self._odd_keyword(node, pointer)) is not None:
            for each in (key, *_TOGETHER.get(key, ())):
                node.pop(each, None)
            return key, pointer
        parent, _, key = pointer.rpartition("/")
        container = find(self._schema, parent)
        if isinstance(container, list):
            container[int(key)] = {}
        elif isinstance(container, dict):
            container[unescape(key)] = {}
        else:
            self._schema = ANY_OBJECT
        return "the schema", pointer

    def _odd_keyword(self, node: dict[str, Any], pointer: str) -> str | None:
        """Return the keyword without which a schema has no fault; None where that is no single one."""
        _, *path = pointer.split("/")
        shared = {
            key: self._schema[key] for key in ("$schema", *_DEFINITIONS) if key in self._schema and key not in node
        }
        for key in sorted(node, key=lambda key: (key in _MAIN_KEYWORDS, key)):
            dropped = (key, *_TOGETHER.get(key, ()))
            kept = {other: value for other, value in node.items() if other not in dropped}
            if len(path) == 2 and path[0] in shared:  # it may refer to itself
                shared[path[0]] = {**shared[path[0]], unescape(path[1]): kept}
            rest = {**shared, **kept}
            is_tried = key not in _DEFINITIONS and self._bytes_left > 0
            if is_tried and _fault_by_itself(rest) is None and not self._probe(_bounded(rest)):
                return key
        return None


def _fault_by_itself(schema: dict[str, Any]) -> SchemaFault | None:
    """Return the first part of a schema that cannot be used, as far as that is seen without compiling."""
    return find_fault(schema) or next(filter(None, (_too_many_optional(*each) for each in walk(schema))), None)


def _too_many_optional(pointer: str, node: dict[str, Any]) -> SchemaFault | None:
    properties, required = node.get("properties"), set(names_in(node.get("required")))
    num_optional = sum(name not in required for name in properties) if isinstance(properties, dict) else 0
    if num_optional <= _MAX_OPTIONAL:
        return None
    return SchemaFault(pointer, f"{num_optional} members may be left out; a grammar can have {_MAX_OPTIONAL}")


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema with the ends that its formats get."""
    from sluice.engine.guidance.translate import bound_formats

    bounded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    bound_formats(bounded)
    return bounded


def _places(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the pointers of all that stands where a schema may stand."""
    yield "#"
    for pointer, node in walk(schema):
        yield from (place for place, _ in children_of(pointer, node))


@cache
def _tokenizer() -> "LLTokenizer":
    """Return a tokenizer of bytes: what a schema compiles to does not depend on the vocabulary."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _compile_error(schema: dict[str, Any]) -> str:
    """Return what the compiler finds wrong with a schema; "" for nothing."""
    from llguidance import LLMatcher, LLParserLimits

    from sluice.engine.guidance.compiler import MAX_STATES, MAX_SYMBOLS
    from sluice.engine.guidance.translate import FUEL, schema_grammar

    limits = LLParserLimits(
        initial_lexer_fuel=FUEL, max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, verbose_errors=False
    )
    matcher = LLMatcher(_tokenizer(), schema_grammar(schema), log_level=0, limits=limits)
    error: str = matcher.get_error()
    if not error:
        matcher.compute_bitmask()
        error = matcher.get_error()
    return error
