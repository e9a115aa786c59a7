"""The whole answer to a request: its text and its tool calls, and whether they are what was asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sluice.load.apis import ParsedEvent
from sluice.load.config import LoadConfigError, ToolUse, Workload

AnswerCheck = Callable[["AnswerRecord"], str | None]
"""Returns the fault of an answer, None for a correct one."""
BUILTIN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"enum": ["invoice", "order", "complaint", "question"]},
        "is_urgent": {"type": "boolean"},
        "priority": {"enum": [1, 2, 3]},
        "labels": {"type": "array", "items": {"enum": ["new", "paid", "late", "lost"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["category", "is_urgent", "priority", "labels"],
    "additionalProperties": False,
}
"""The schema of `--json-schema builtin`. Its answers are short, since it lists every value."""
BUILTIN_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Berlin", "Nairobi", "Lima", "Osaka"]},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    {
        "name": "set_light",
        "description": "Switch the light of a room on or off.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall", "office"]}, "is_on": {"type": "boolean"}},
            "required": ["room", "is_on"],
            "additionalProperties": False,
        },
    },
)
"""The tools of `--tools builtin`."""


@dataclass(slots=True)
class ToolCallRecord:
    """A tool call as far as it has arrived."""

    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class AnswerRecord:
    """Collects what a stream brings."""

    texts: list[str] = field(default_factory=list)
    calls: dict[int, ToolCallRecord] = field(default_factory=dict)
    response_id: str | None = None

    def add(self, event: ParsedEvent) -> None:
        if event.text:
            self.texts.append(event.text)
        if event.response_id is not None:
            self.response_id = event.response_id
        for part in event.calls:
            call = self.calls.setdefault(part.place, ToolCallRecord())
            call.name = part.name or call.name
            call.arguments.append(part.arguments)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def schema_check(schema: dict[str, Any]) -> AnswerCheck:
    """Return the check that an answer is JSON which meets a schema."""
    check = _json_check(schema)
    return lambda answer: check(answer.text)


def tool_check(use: ToolUse) -> AnswerCheck:
    """Return the check that calls are of the tools that were offered, with arguments that meet their parameters."""
    checks = {each["name"]: _json_check(each.get("parameters", {"type": "object"})) for each in use.functions}

    def check(answer: AnswerRecord) -> str | None:
        if not answer.calls and (use.names_tool or use.choice == "required"):
            return f"no tool call, although the tool choice is {use.choice}"
        return next(filter(None, (_wrong_call(call, checks) for call in answer.calls.values())), None)

    return check


def _wrong_call(call: ToolCallRecord, checks: dict[str, Callable[[str], str | None]]) -> str | None:
    if call.name not in checks:
        return f"a call of {call.name!r}, which was not offered"
    wrong = checks[call.name]("".join(call.arguments) or "{}")
    return None if wrong is None else f"arguments of {call.name}: {wrong}"


def _json_check(schema: dict[str, Any]) -> Callable[[str], str | None]:
    """Return the check that a text is JSON which meets a schema. Raises LoadConfigError where it is no schema."""
    try:
        import jsonschema  # only here: it takes long to import
    except ImportError as error:
        raise LoadConfigError(f"schemas need jsonschema ({error}): pip install 'sluice[load]'") from None

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise LoadConfigError(f"not a JSON schema: {error.json_path}: {error.message}") from None
    validator = jsonschema.Draft202012Validator(schema)

    def check(text: str) -> str | None:
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            return f"{error}: {text[-200:]!r}"
        wrong = jsonschema.exceptions.best_match(validator.iter_errors(value))
        return None if wrong is None else f"{wrong.json_path}: {wrong.message}"

    return check


def needs_answers(workload: Workload) -> bool:
    """Return whether a run has to keep the answers: for later turns, or to look into them."""
    return workload.turns.high > 1 or workload.json_schema is not None or workload.tool_use is not None
