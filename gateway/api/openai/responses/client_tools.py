"""Tools that are built into clients: the function that a model is shown for each, and the items of its calls.

OpenAI's models know these tools by their types. Other models get their arguments as a JSON schema.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from sluice.gateway.api.openai.responses.schemas import OtherTool

Fields = dict[str, Any]


class ClientTool(NamedTuple):
    """A tool that a client runs. `call` and `result` are the types of its items, `prefix` begins the ids of calls.

    `read` makes the fields of a call of the arguments that a model wrote, of which any may be missing; `write` makes
    arguments of a call.
    """

    description: str
    parameters: Fields
    call: str
    result: str
    prefix: str
    read: Callable[[Fields], Fields]
    write: Callable[[Fields], Fields]


def _schema(required: list[str], **properties: Fields) -> Fields:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _of_type(kind: str, description: str) -> Fields:
    return {"type": kind, "description": description}


def _given(fields: Mapping[str, Any], *names: str) -> Fields:
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


_TEXTS = {"type": "array", "items": {"type": "string"}}
_TIMEOUT = _of_type("integer", "The longest that it may run, in milliseconds.")


def _read_local_shell(arguments: Fields) -> Fields:
    command, folder = arguments.get("command"), arguments.get("working_directory")
    words = ["bash", "-lc", command] if isinstance(command, str) else _texts(command)
    timeout_ms = _number(arguments.get("timeout_ms"))
    action: Fields = {"type": "exec", "command": words, "env": {}, "timeout_ms": timeout_ms, "user": None}
    return {"action": {**action, "working_directory": _text(folder) or None}}


def _write_local_shell(item: Fields) -> Fields:
    return _given(_object(item.get("action")), "command", "working_directory", "timeout_ms")


def _read_shell(arguments: Fields) -> Fields:
    commands = arguments.get("commands")
    limits = {name: _number(arguments.get(name)) for name in ("timeout_ms", "max_output_length")}
    words = [commands] if isinstance(commands, str) else _texts(commands)
    return {"action": {"commands": words, **limits}, "environment": {"type": "local"}}


def _write_shell(item: Fields) -> Fields:
    return _given(_object(item.get("action")), "commands", "timeout_ms", "max_output_length")


def _read_patch(arguments: Fields) -> Fields:
    kind, path = arguments.get("type"), _text(arguments.get("path"))
    if kind == "delete_file":
        return {"operation": {"type": kind, "path": path}}
    kind = kind if kind == "create_file" else "update_file"
    return {"operation": {"type": kind, "path": path, "diff": _text(arguments.get("diff"))}}


def _write_patch(item: Fields) -> Fields:
    return _given(_object(item.get("operation")), "type", "path", "diff")


def _read_search(arguments: Fields) -> Fields:
    return {"execution": "client", "arguments": arguments}


def _write_search(item: Fields) -> Fields:
    return _object(item.get("arguments"))


CLIENT_TOOLS = {
    "local_shell": ClientTool(
        "Runs a command on the user's machine and returns its output.",
        _schema(
            ["command"],
            command={**_TEXTS, "description": "The program and its arguments."},
            working_directory=_of_type("string", "The folder to run it in."),
            timeout_ms=_TIMEOUT,
        ),
        *("local_shell_call", "local_shell_call_output", "lsh", _read_local_shell, _write_local_shell),
    ),
    "shell": ClientTool(
        "Runs shell commands on the user's machine and returns their output.",
        _schema(
            ["commands"],
            commands={**_TEXTS, "description": "Command lines, which may run at the same time."},
            timeout_ms=_TIMEOUT,
            max_output_length=_of_type("integer", "Most characters of output to return."),
        ),
        *("shell_call", "shell_call_output", "sh", _read_shell, _write_shell),
    ),
    "apply_patch": ClientTool(
        "Creates, changes or deletes one file of the user's.",
        _schema(
            ["type", "path"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_of_type("string", "The file."),
            diff=_of_type("string", "The change as a diff, with + in front of each line of a new file."),
        ),
        *("apply_patch_call", "apply_patch_call_output", "apc", _read_patch, _write_patch),
    ),
    "tool_search": ClientTool(
        "Searches for more tools. Those that it finds can be called from then on.",
        _schema(["query"], query=_of_type("string", "What the tools should do.")),
        *("tool_search_call", "tool_search_output", "tsc", _read_search, _write_search),
    ),
}
"""The tools by their types, which are the names of their functions, too."""
CLIENT_CALLS = {tool.call: name for name, tool in CLIENT_TOOLS.items()}
"""The names of the tools, by the types of the items of their calls."""


def client_function(tool: OtherTool) -> Fields | None:
    """Return the function that a model is shown for a tool that the client runs; None for a tool of a server."""
    known, sent = CLIENT_TOOLS.get(tool.type), tool.sent
    environment = _object(sent.get("environment")).get("type", "local")
    is_remote = tool.type == "tool_search" and sent.get("execution") != "client"
    if known is None or is_remote or environment != "local":
        return None
    described = sent.get("description")
    parameters = sent.get("parameters") if tool.type == "tool_search" else None
    return {
        "name": tool.type,
        "description": described if isinstance(described, str) else known.description,
        "parameters": parameters if isinstance(parameters, dict) else known.parameters,
    }


def read_arguments(text: str) -> Fields:
    """Return the arguments of a call; none where it was cut off, as a client would run half of them."""
    with suppress(ValueError, RecursionError):
        return _object(json.loads(text))
    return {}


def _object(value: Any) -> Fields:
    return value if isinstance(value, dict) else {}
