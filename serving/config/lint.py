"""What people write into config.pbtxt that Triton does not know, and what they should write.

Where the meaning is plain and serving it does no harm, it is taken with a note; else it is refused with the right text.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.config.locations import FieldLocations, WrittenField
from serving.findings import Finding


@dataclass(frozen=True, slots=True)
class TextFinding:
    """`begin` to `end` of the text is to be `replacement`; None: refused."""

    finding: Finding
    begin: int
    end: int
    replacement: str | None = None

    @property
    def is_refused(self) -> bool:
        return self.replacement is None


def finding_at(written: WrittenField, message: str, fix: str = "") -> Finding:
    """Of a field that stands in the text."""
    return Finding(message, _path_text(written), fix, written.line, written.column)


def _path_text(written: WrittenField) -> str:
    """With numbers where there may be several."""
    parts = []
    for depth, (name, number) in enumerate(written.path, start=1):
        field = field_at(written.names[:depth])
        parts.append(f"{name}[{number}]" if field is not None and field.is_repeated else name)
    return ".".join(parts)


_BYTES = "TYPE_BYTES"


def lint_text(locations: FieldLocations, text: str) -> list[TextFinding]:
    """What is wrong with names and words of a text, in its order. Syntax is protobuf's to check."""
    slips: dict[int, TextFinding] = {}
    for written in locations.fields:
        slip = _slip(written, locations, text)
        if slip is not None:
            slips.setdefault(slip.begin, slip)
    blocks = [slip for slip in slips.values() if slip.replacement is not None]
    return [slip for slip in slips.values() if not any(block.begin < slip.begin < block.end for block in blocks)]


def apply_fixes(text: str, slips: list[TextFinding]) -> str:
    """The text with every replacement. Lines keep their numbers."""
    for slip in sorted(slips, key=lambda each: each.begin, reverse=True):
        if slip.replacement is not None:
            text = text[: slip.begin] + slip.replacement + text[slip.end :]
    return text


def _slip(written: WrittenField, locations: FieldLocations, text: str) -> TextFinding | None:
    names = written.names
    parent = field_at(names[:-1])
    if names[:-1] and (parent is None or parent.message_type is None):
        return None
    foreign = find_misplaced(written, locations, text)
    if foreign is not None:
        return foreign
    field = field_at(names)
    if field is None:
        message = ModelConfig.DESCRIPTOR if parent is None else parent.message_type
        return TextFinding(finding_at(written, unknown_field(message, names[-1])), *written.statement)
    if field.enum_type is not None and written.value is not None:
        return _enum_slip(written)
    return None


def _enum_slip(written: WrittenField) -> TextFinding | None:
    field = field_at(written.names)
    word = written.value or ""
    if field is None or field.enum_type is None or word in field.enum_type.values_by_name or not word.isidentifier():
        return None
    meant = meant_value(field.enum_type, word)
    fix = f"{field.name}: {meant}" if meant else ""
    if word == _BYTES:
        finding = finding_at(written, f"{_BYTES} is read as {meant}, its name in config.pbtxt", fix)
        return TextFinding(finding, written.begin, written.end, meant)
    finding = finding_at(written, unknown_value(field.enum_type, field.name, word), fix)
    return TextFinding(finding, written.begin, written.end)


_RATE_LIMIT = "rate_limit_resources"
_AGENTS = "model_repository_agents"
_POLICY_TEXTS = {
    "latest": "version_policy { latest { num_versions: 1 } }",
    "all": "version_policy { all { } }",
    "specific": "version_policy { specific { versions: [1] } }",
}


def find_misplaced(written: WrittenField, locations: FieldLocations, text: str) -> TextFinding | None:
    """What there is to say of such a field; None for any other."""
    if written.names == (_AGENTS, "kind"):
        return _agents_slip(written, locations, text)
    if written.names in ((_RATE_LIMIT,), ("instance_group", _RATE_LIMIT)):
        return TextFinding(_rate_limit_finding(written, locations), *written.statement)
    return None


def _rate_limit_finding(written: WrittenField, locations: FieldLocations) -> Finding:
    """Rate limiting has its fields in the instance group, and its budget on the command line."""
    if len(written.path) > 1:
        fix = _limiter_text([each.value for each in _siblings(written, locations) if each.value], locations)
        return finding_at(written, "ModelInstanceGroup has no field 'rate_limit_resources'", fix)
    names = [each.value for each in _below(written, "name", locations) if each.value] or ["NAME"]
    budget = " ".join(f"--rate-limit-resource={name}:COUNT" for name in names)
    return finding_at(
        written,
        "ModelConfig has no field 'rate_limit_resources': how much there is of a resource is said to the server, what "
        "an instance takes of it in its instance_group",
        f"instance_group [ {{ {_limiter_text(names, locations)} }} ], and start with {budget}",
    )


def _limiter_text(names: list[str], locations: FieldLocations) -> str:
    each = (f'{{ name: "{name}"{" global: true" if _is_global(name, locations) else ""} count: 1 }}' for name in names)
    return f"rate_limiter {{ resources [ {', '.join(each)} ] }}"


def _is_global(resource: str, locations: FieldLocations) -> bool:
    """Whether the field at the top says so."""
    top = [each for each in locations.fields if each.names == (_RATE_LIMIT, "name") and each.value == resource]
    flags = [locations.find(f"{_RATE_LIMIT}[{each.path[0][1]}].global") for each in top]
    return any(flag is not None and flag.value == "true" for flag in flags)


def _agents_slip(written: WrittenField, locations: FieldLocations, text: str) -> TextFinding:
    """Agents have a name; one of kind version_policy is no agent but the field of that name."""
    if written.value != "version_policy":
        message = "model_repository_agents has no field 'kind'"
        return TextFinding(finding_at(written, message, _agent_text(written.value or "")), *written.statement)
    path = f"{_AGENTS}[{written.path[0][1]}]"
    block, asked = locations.find(path), locations.find(f"{path}.parameters[0].value")
    policy = asked.value if asked is not None and asked.value in _POLICY_TEXTS else "latest"
    place = locations.find(f"version_policy.{policy}")
    is_said_again = place is not None and place.names == ("version_policy", policy)
    if block is None or place is None or not is_said_again or len(list(_siblings(block, locations))) > 1:
        message = "an agent of kind version_policy does not exist: which versions are served is a field of its own"
        return TextFinding(finding_at(written, message, _POLICY_TEXTS[policy or ""]), *written.statement)
    finding = finding_at(
        block,
        "there is no agent of kind version_policy, it is left out: version_policy in line "
        f"{locations.line_of('version_policy')} says which versions are served",
        f"version_policy alone; an agent is {_agent_text('checksum')}",
    )
    begin, end = block.statement
    return TextFinding(finding, begin, end, re.sub(r"[^\n]", " ", text[begin:end]))


def _agent_text(kind: str) -> str:
    return f'model_repository_agents {{ agents [ {{ name: "{kind}" }} ] }}'


def _siblings(written: WrittenField, locations: FieldLocations) -> Iterator[WrittenField]:
    """The values of the same statement, itself too."""
    return (each for each in locations.fields if each.statement == written.statement)


def _below(written: WrittenField, name: str, locations: FieldLocations) -> Iterator[WrittenField]:
    """The fields called `name` in every value of the same statement."""
    parents = {each.path for each in _siblings(written, locations)}
    return (each for each in locations.fields if each.path[:-1] in parents and each.path[-1][0] == name)


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
