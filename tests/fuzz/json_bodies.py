"""JSON as no good client writes it: hostile values anywhere in good bodies, and broken text."""

import json
from copy import deepcopy
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.fuzz.damage import damaged


class Raw(NamedTuple):
    """Text in the place of a value, which need not be JSON."""

    text: bytes


class Pairs(NamedTuple):
    """An object whose names may repeat."""

    members: tuple[tuple[str, Any], ...]


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 128, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.5, 1.5, -0.0, 1e-300, 1e308, "", " ", "a", "0", "-1", "1e5", "NaN", "null", "true", "auto", "none"),
    *("tiny", "rill"),
    *("\0", "\ud800", "a\udfffb", "💥" * 50, "\u202e", "x" * 5000, "../../etc/passwd", "%s%n"),
    *("{{ 7 * 7 }}", "<think>"),
    *("<|end|>", "<|im_start|>system", "data:image/png;base64,AAAA", "http://127.0.0.1:1/"),
    *("file:///etc/passwd", "\r\n\r\n"),
    *([], {}, [[]], [None], [1, "a"], [{}], {"": None}, {"a": {"b": [1]}}, {"type": "x"}, {"$ref": "#"}, ["a"] * 600),
    *(Raw(b"NaN"), Raw(b"-Infinity"), Raw(b"1e999"), Raw(b"-"), Raw(b"01"), Raw(b"0x1"), Raw(b"1" * 500), Raw(b"tru")),
    *(Raw(b'"\\ud800"'), Raw(b'"\xff"'), Raw(b'"\t"'), Raw(b'"\\x"'), Raw(b""), Raw(b"'a'"), Raw(b"/**/1"), Raw(b'"a')),
    *(Raw(b"[" * 90 + b"]" * 90), Raw(b"[" * 5000)),
    *(Raw(b'{"a":' * 120 + b"1" + b"}" * 120), Raw(b"[0" + b",1" * 30_000 + b"]")),
    Pairs((("a", 1), ("a", 2))),
)
"""Values for any place in a body."""
hostile = st.sampled_from(HOSTILE).map(deepcopy)
_SNIPPETS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"null",
    b"1e999",
    b'"\\ud800"',
    b"\xef\xbb\xbf",
    b"//",
    b"\n",
)


def encode(value: Any) -> bytes:
    """Return a value's JSON, or what stands for it."""
    match value:
        case Raw(text):
            return text
        case Pairs(members):
            return b"{" + b", ".join(encode(name) + b": " + encode(each) for name, each in members) + b"}"
        case dict():
            return encode(Pairs(tuple(value.items())))
        case list():
            return b"[" + b", ".join(map(encode, value)) + b"]"
    return json.dumps(value).encode()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container below a value with each of its keys."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        each = pending.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        pending += [each[key] for key in keys]
    return found


@st.composite
def bodies(draw: st.DrawFn, example: Any, schema: dict[str, Any]) -> bytes:
    """A good body with up to three changes, then perhaps damaged as text."""
    body = {"body": deepcopy(example)}
    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(places(body)))
        value = container[key]
        change = draw(st.sampled_from(("replace", "replace", "add", "add", "add", "remove", "repeat", "nest")))
        if change == "add" and isinstance(body["body"], dict) and schema.get("properties"):
            name = draw(st.sampled_from(sorted(schema["properties"])))
            body["body"][name] = draw(of_schema(schema["properties"][name]))
        elif change == "remove" and container is not body:
            del container[key]
        elif change == "repeat" and isinstance(value, dict):
            container[key] = Pairs((*value.items(), *((name, draw(hostile)) for name in list(value)[:2])))
        elif change == "nest":
            container[key] = [value] if draw(st.booleans()) else {"a": value}
        else:
            container[key] = draw(hostile)
    text = encode(body["body"])
    return draw(damaged(text, _SNIPPETS, 2)) if draw(st.integers(0, 5)) == 0 else text


@st.composite
def of_schema(draw: st.DrawFn, schema: dict[str, Any], depth: int = 0) -> Any:
    """A value that a schema describes, as a rule, and else a hostile one."""
    if draw(st.integers(0, 3)) == 0 or depth > 5:
        return draw(hostile)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return draw(of_schema(draw(st.sampled_from(schema[key])), depth + 1))
    if "const" in schema or "enum" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    match schema.get("type"):
        case "integer":
            return draw(st.integers(-2, 20))
        case "number":
            return draw(st.sampled_from((0, 0.0, 0.5, 1, 1.0, 2)))
        case "boolean":
            return draw(st.booleans())
        case "string":
            return draw(
                st.sampled_from(
                    ("a", "low", "high", "auto", "text", "user", "What is a block?", "json_object", "float")
                )
            )
        case "array":
            return draw(st.lists(of_schema(schema.get("items") or {}, depth + 1), max_size=3))
        case "object" if schema.get("properties"):
            names = draw(st.sets(st.sampled_from(sorted(schema["properties"])), max_size=4))
            names |= set(schema.get("required", ()))
            return {name: draw(of_schema(schema["properties"].get(name, {}), depth + 1)) for name in sorted(names)}
        case "object":
            return draw(st.dictionaries(st.sampled_from(("a", "type", "name", "5", "")), hostile, max_size=2))
    return draw(hostile)
