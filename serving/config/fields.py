"""The fields and enum values that config.pbtxt may have, and which of them somebody meant who wrote another."""

import difflib
from collections.abc import Iterator, Sequence
from functools import cache

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

_SURELY = 0.8
_PERHAPS = 0.6
"""How alike two names must be, 1 being the same."""
_MOST_LISTED = 6
"""Values of an enum that have room in a message."""

_DATA_TYPES = {
    "BYTES": "STRING",
    "STR": "STRING",
    "TEXT": "STRING",
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "FLOAT32": "FP32",
    "FLOAT64": "FP64",
    "HALF": "FP16",
    "DOUBLE": "FP64",
    "BFLOAT16": "BF16",
    "INT": "INT32",
    "LONG": "INT64",
    "BOOLEAN": "BOOL",
}
"""What other frameworks call an element type, without TYPE_."""


def field_at(names: Sequence[str]) -> FieldDescriptor | None:
    """The field at that path from the top; None where there is none. A map's entry has the fields key and value."""
    message: Descriptor | None = ModelConfig.DESCRIPTOR
    field = None
    for name in names:
        field = message.fields_by_name.get(name) if message is not None else None
        if field is None:
            return None
        message = field.message_type
    return field


def unknown_field(message: Descriptor, name: str) -> str:
    """That it does not exist, and what was perhaps meant: a field of a like name, or of this name in another place."""
    said = f"{message.name} has no field '{name}'"
    known = [each.name for each in message.fields]
    near = difflib.get_close_matches(name, known, n=1, cutoff=_SURELY)
    if near:
        return f"{said}; did you mean '{near[0]}'?"
    places = [path.removesuffix(f".{name}") for path in _paths() if path.endswith(f".{name}")]
    if places:
        return f"{said}; it stands in {' or '.join(places[:2])}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=_PERHAPS)
    return f"{said}; did you mean '{near[0]}'?" if near else said


def meant_value(enum: EnumDescriptor, word: str) -> str:
    """The value that was meant by `word`; "" where nobody can tell."""
    known = [each.name for each in enum.values]
    if enum.name == "DataType":
        bare = word.upper().removeprefix("TYPE_")
        typed = f"TYPE_{_DATA_TYPES.get(bare, bare)}"
        return typed if typed in known else ""
    ending = [each for each in known if each.endswith(f"_{word.upper()}")]
    near = ending or difflib.get_close_matches(word.upper(), known, n=1, cutoff=_PERHAPS)
    return near[0] if near else ""


def unknown_value(enum: EnumDescriptor, field: str, word: str) -> str:
    """That `field` cannot have it, and what it can have where that is short."""
    known = [each.name for each in enum.values]
    listed = f"; there are {', '.join(known)}" if len(known) <= _MOST_LISTED else ""
    return f"{field} has no value named {word}{listed}"


@cache
def _paths() -> tuple[str, ...]:
    """Every field below the top, shortest paths first."""
    return tuple(sorted(_walk(ModelConfig.DESCRIPTOR, ""), key=lambda path: path.count(".")))


def _walk(message: Descriptor, prefix: str) -> Iterator[str]:
    for field in message.fields:
        yield prefix + field.name
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from _walk(inner, f"{prefix}{field.name}.")
