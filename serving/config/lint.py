"""Lint of a config.pbtxt's text: fields and values that Triton does not know, and their fixes.

Where the meaning is clear and serving it does no harm, the fix is applied and noted; otherwise the text is rejected
with the fix in the message.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.config.locations import FieldLocations, WrittenField
from sluice.serving.findings import Finding

_BYTES = "TYPE_BYTES"
_RATE_LIMIT = "rate_limit_resources"
_AGENTS = "model_repository_agents"
_POLICY_TEXTS = {
    "latest": "version_policy { latest { num_versions: 1 } }",
    "all": "version_policy { all { } }",
    "specific": "version_policy { specific { versions: [1] } }",
}
_TYPING_ERROR = 0.8
_SIMILAR = 0.6
"""Similarity of two names, 1 for equal ones: from the first on it is a typing error, from the second on a guess."""
_MAX_LISTED = 6
"""Most values of an enum that a message lists."""

_ESCAPE = re.compile(
    r"""\\(?:[abfnrtv?\\'"]|[0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|(?P<unknown>.))"""
)
"""An escape sequence of a string: https://protobuf.dev/reference/protobuf/textformat-spec/#string"""

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
"""Element types by the names that other frameworks have for them, without TYPE_."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A finding in the text from `begin` to `end`. `replacement` is the fix to apply; None: the text is rejected."""

    finding: Finding
    begin: int
    end: int
    replacement: str | None = None

    @property
    def is_error(self) -> bool:
        return self.replacement is None


def lint_text(locations: FieldLocations, text: str) -> list[LintFinding]:
    """Return the findings on names and values of a text, in its order. Protobuf checks the syntax."""
    findings: dict[int, LintFinding] = {}
    for written in locations.fields:
        found = _lint_field(written, locations, text)
        if found is not None:
            findings.setdefault(found.begin, found)
    blocks = [found for found in findings.values() if found.replacement is not None]
    return [found for found in findings.values() if not any(block.begin < found.begin < block.end for block in blocks)]


def apply_fixes(text: str, findings: list[LintFinding]) -> str:
    """Return the text with every fix applied. Lines keep their numbers."""
    for found in sorted(findings, key=lambda each: each.begin, reverse=True):
        if found.replacement is not None:
            text = text[: found.begin] + found.replacement + text[found.end :]
    return text


def _lint_field(written: WrittenField, locations: FieldLocations, text: str) -> LintFinding | None:
    names = written.names
    parent = find_field(names[:-1])
    if names[:-1] and (parent is None or parent.message_type is None):
        return None
    misplaced = find_misplaced(written, locations, text)
    if misplaced is not None:
        return misplaced
    field = find_field(names)
    if field is None:
        message = ModelConfig.DESCRIPTOR if parent is None else parent.message_type
        return LintFinding(locate_finding(written, describe_unknown_field(message, names[-1])), *written.statement)
    if written.value is None:
        return None
    return _lint_escapes(written, written.value) if field.enum_type is None else _lint_enum(written)


def _lint_escapes(written: WrittenField, value: str) -> LintFinding | None:
    """Return the finding on the first backslash that begins no escape sequence; Triton's parser refuses such a string,
    that of Python reads it as if it were escaped."""
    unknown = next((found["unknown"] for found in _ESCAPE.finditer(value) if found["unknown"]), None)
    if unknown is None:
        return None
    message = f"a string of protobuf has no escape sequence \\{unknown}: a backslash is written as \\\\"
    return LintFinding(locate_finding(written, message), *written.statement)


def _lint_enum(written: WrittenField) -> LintFinding | None:
    field = find_field(written.names)
    word = written.value or ""
    if field is None or field.enum_type is None or word in field.enum_type.values_by_name or not word.isidentifier():
        return None
    meant = guess_value(field.enum_type, word)
    fix = f"{field.name}: {meant}" if meant else ""
    if word == _BYTES:
        finding = locate_finding(written, f"{_BYTES} is read as {meant}, its name in config.pbtxt", fix)
        return LintFinding(finding, written.begin, written.end, meant)
    finding = locate_finding(written, describe_unknown_value(field.enum_type, field.name, word), fix)
    return LintFinding(finding, written.begin, written.end)


def find_misplaced(written: WrittenField, locations: FieldLocations, text: str) -> LintFinding | None:
    """Return the finding on a field that people expect here and Triton has elsewhere; None for any other field."""
    if written.names == (_AGENTS, "kind"):
        return _lint_agents(written, locations, text)
    if written.names in ((_RATE_LIMIT,), ("instance_group", _RATE_LIMIT)):
        return LintFinding(_rate_limit_finding(written, locations), *written.statement)
    return None


def _rate_limit_finding(written: WrittenField, locations: FieldLocations) -> Finding:
    """Point to the rate limiter's fields in the instance group, and to its resources on the command line."""
    if len(written.path) > 1:
        fix = _limiter_text([each.value for each in _siblings(written, locations) if each.value], locations)
        return locate_finding(written, "ModelInstanceGroup has no field 'rate_limit_resources'", fix)
    names = [each.value for each in _below(written, "name", locations) if each.value] or ["NAME"]
    budget = " ".join(f"--rate-limit-resource={name}:COUNT" for name in names)
    return locate_finding(
        written,
        "ModelConfig has no field 'rate_limit_resources': how much there is of a resource is said to the server, what "
        "an instance takes of it in its instance_group",
        f"instance_group [ {{ {_limiter_text(names, locations)} }} ], and start with {budget}",
    )


def _limiter_text(names: list[str], locations: FieldLocations) -> str:
    each = (f'{{ name: "{name}"{" global: true" if _is_global(name, locations) else ""} count: 1 }}' for name in names)
    return f"rate_limiter {{ resources [ {', '.join(each)} ] }}"


def _is_global(resource: str, locations: FieldLocations) -> bool:
    """Return whether the misplaced field declares the resource as global."""
    top = [each for each in locations.fields if each.names == (_RATE_LIMIT, "name") and each.value == resource]
    flags = [locations.find(f"{_RATE_LIMIT}[{each.path[0][1]}].global") for each in top]
    return any(flag is not None and flag.value == "true" for flag in flags)


def _lint_agents(written: WrittenField, locations: FieldLocations, text: str) -> LintFinding:
    """Agents have a name and no kind. One of kind version_policy stands for the field of that name."""
    if written.value != "version_policy":
        message = "model_repository_agents has no field 'kind'"
        return LintFinding(locate_finding(written, message, _agent_text(written.value or "")), *written.statement)
    path = f"{_AGENTS}[{written.path[0][1]}]"
    block, parameter = locations.find(path), locations.find(f"{path}.parameters[0].value")
    policy = parameter.value if parameter is not None and parameter.value in _POLICY_TEXTS else "latest"
    field = locations.find(f"version_policy.{policy}")
    is_repeated = field is not None and field.names == ("version_policy", policy)
    if block is None or not is_repeated or len(list(_siblings(block, locations))) > 1:
        message = "an agent of kind version_policy does not exist: which versions are served is a field of its own"
        return LintFinding(locate_finding(written, message, _POLICY_TEXTS[policy or ""]), *written.statement)
    finding = locate_finding(
        block,
        "there is no agent of kind version_policy, it is left out: version_policy in line "
        f"{locations.line_of('version_policy')} says which versions are served",
        f"version_policy alone; an agent is {_agent_text('checksum')}",
    )
    begin, end = block.statement
    return LintFinding(finding, begin, end, re.sub(r"[^\n]", " ", text[begin:end]))


def _agent_text(kind: str) -> str:
    return f'model_repository_agents {{ agents [ {{ name: "{kind}" }} ] }}'


def _siblings(written: WrittenField, locations: FieldLocations) -> Iterator[WrittenField]:
    """Yield the values of the same statement, the given one too."""
    return (each for each in locations.fields if each.statement == written.statement)


def _below(written: WrittenField, name: str, locations: FieldLocations) -> Iterator[WrittenField]:
    """Yield the fields called `name` in every value of the same statement."""
    parents = {each.path for each in _siblings(written, locations)}
    return (each for each in locations.fields if each.path[:-1] in parents and each.path[-1][0] == name)


def locate_finding(written: WrittenField, message: str, fix: str = "") -> Finding:
    """Return a finding with the path and position of a field in the text."""
    return Finding(message, _path_text(written), fix, written.line, written.column)


def _path_text(written: WrittenField) -> str:
    """Return the field's path, with numbers where it is repeated."""
    parts = []
    for depth, (name, number) in enumerate(written.path, start=1):
        field = find_field(written.names[:depth])
        parts.append(f"{name}[{number}]" if field is not None and field.is_repeated else name)
    return ".".join(parts)


def find_field(names: Sequence[str]) -> FieldDescriptor | None:
    """Return the field at that path from the top, else None. A map's entry has the fields key and value."""
    message: Descriptor | None = ModelConfig.DESCRIPTOR
    field = None
    for name in names:
        field = message.fields_by_name.get(name) if message is not None else None
        if field is None:
            return None
        message = field.message_type
    return field


def describe_unknown_field(message: Descriptor, name: str) -> str:
    """Return a message with the likely field: one of a similar name, or of the same name in another message."""
    text = f"{message.name} has no field '{name}'"
    known = [each.name for each in message.fields]
    near = difflib.get_close_matches(name, known, n=1, cutoff=_TYPING_ERROR)
    if near:
        return f"{text}; did you mean '{near[0]}'?"
    parents = [path.removesuffix(f".{name}") for path in _field_paths() if path.endswith(f".{name}")]
    if parents:
        return f"{text}; it stands in {' or '.join(parents[:2])}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
    return f"{text}; did you mean '{near[0]}'?" if near else text


def guess_value(enum: EnumDescriptor, word: str) -> str:
    """Return the value that `word` likely means, else ""."""
    known = [each.name for each in enum.values]
    if enum.name == "DataType":
        bare = word.upper().removeprefix("TYPE_")
        typed = f"TYPE_{_DATA_TYPES.get(bare, bare)}"
        return typed if typed in known else ""
    ending = [each for each in known if each.endswith(f"_{word.upper()}")]
    near = ending or difflib.get_close_matches(word.upper(), known, n=1, cutoff=_SIMILAR)
    return near[0] if near else ""


def describe_unknown_value(enum: EnumDescriptor, field: str, word: str) -> str:
    """Return a message with the enum's values, where they are few."""
    known = [each.name for each in enum.values]
    listed = f"; there are {', '.join(known)}" if len(known) <= _MAX_LISTED else ""
    return f"{field} has no value named {word}{listed}"


@cache
def _field_paths() -> tuple[str, ...]:
    """Return the paths of all fields, shortest first."""
    return tuple(sorted(_walk_fields(ModelConfig.DESCRIPTOR, ""), key=lambda path: path.count(".")))


def _walk_fields(message: Descriptor, prefix: str) -> Iterator[str]:
    for field in message.fields:
        yield prefix + field.name
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from _walk_fields(inner, f"{prefix}{field.name}.")
