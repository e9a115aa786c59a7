"""Tools that Anthropic defines: those that clients run become functions with the schema that clients know, and those
that Anthropic's own servers run have no place here."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sluice.errors import invalid
from sluice.gateway.api.anthropic.schemas import BuiltInTool, CustomTool, ToolChoiceFields

_VERSION = re.compile(r"_(\d{8})$")
_INSERT_TEXT_SINCE = "20250728"
"""The version of the text editor from which its text to insert has a name of its own."""
_TEXT = {"type": "string"}


def _text(about: str) -> dict[str, str]:
    return _TEXT | {"description": about}


_BASH = {
    "command": _text("The command to run."),
    "restart": {"type": "boolean", "description": "Whether to begin a new session."},
}
_EDITS: dict[str, Any] = {
    "path": _text("The file or directory."),
    "file_text": _text("Of create: the content of the file."),
    "old_str": _text("Of str_replace: the text to replace, which the file has once."),
    "new_str": _text("Of str_replace, and of insert where it has no insert_text: the new text."),
    "insert_line": {"type": "integer", "description": "Of insert: the line to insert after; 0 is the beginning."},
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "Of view: first and last line."},
}
_INSERT_TEXT = {"insert_text": _text("Of insert: the new text.")}
_MOVES = {"old_path": _text("Of rename: the path."), "new_path": _text("Of rename: the new path.")}
_EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")


class ToolsByPath(NamedTuple):
    """The functions among a request's tools, by their paths, and the other tools' types by theirs."""

    functions: Mapping[str, CustomTool]
    ignored: Mapping[str, BuiltInTool]


def declare_tools(sent: Sequence[CustomTool | BuiltInTool]) -> ToolsByPath:
    """Return which tools a model may call."""
    functions, ignored = {}, {}
    for index, tool in enumerate(sent):
        path = f"tools[{index}]"
        function = _function(tool) if isinstance(tool, BuiltInTool) else tool
        if function is not None:
            functions[path] = function
        elif isinstance(tool, BuiltInTool):
            ignored[path] = tool
    return ToolsByPath(functions, ignored)


def refuse_ignored(choice: ToolChoiceFields, tools: ToolsByPath) -> None:
    """Raise INVALID for the choice of a tool that no model can call here."""
    for tool in tools.ignored.values():
        if choice.type == "tool" and choice.name in (tool.name, _VERSION.sub("", tool.type)):
            what = f"{choice.name!r} of the type {tool.type!r} is not run here"
            raise invalid("tool_choice.name", f"tool_choice.name must be a tool that the client runs: {what}")


def _function(tool: BuiltInTool) -> CustomTool | None:
    """Return the function that a tool of Anthropic's is, None for one that the client does not run."""
    found = _VERSION.search(tool.type)
    kind, version = _VERSION.sub("", tool.type), found[1] if found else ""
    if kind == "bash":
        return _custom(tool, "bash", "Runs commands in a session of bash, which keeps its state.", _BASH)
    if kind == "text_editor":
        about = "Views, creates and edits text files."
        more = _INSERT_TEXT if version >= _INSERT_TEXT_SINCE else {}
        return _custom(tool, "str_replace_based_edit_tool", about, _EDITS | more, _EDITOR_COMMANDS)
    if kind == "memory":
        about = "Keeps notes between conversations, as files under /memories."
        commands = (*_EDITOR_COMMANDS, "delete", "rename")
        return _custom(tool, "memory", about, _EDITS | _INSERT_TEXT | _MOVES, commands)
    return None


def _custom(
    tool: BuiltInTool, name: str, about: str, properties: Mapping[str, Any], commands: Sequence[str] = ()
) -> CustomTool:
    command = {"command": {"type": "string", "enum": list(commands)}} if commands else {}
    schema = {"type": "object", "properties": {**command, **properties}, "required": list(command)}
    return CustomTool.model_validate({"name": tool.name or name, "description": about, "input_schema": schema})
