"""The tools of a response: the functions that its prompt shows for them, and the choice among them.

The model knows functions alone. A custom tool is one with a text as its only argument, and the tools of a namespace
have that in front of their names. A tool of another type runs on OpenAI's servers or is built into a client; none of
those is shown.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sluice.errors import invalid
from sluice.gateway.api.fields import MAX_TOOLS, check_tool_names
from sluice.gateway.api.openai.responses.schemas import (
    CustomResponseTool,
    NamespaceTool,
    OtherTool,
    PromptFields,
    ResponseTool,
    ResponseToolChoice,
)
from sluice.gateway.front.http.parsing import quote_value
from sluice.pipelines.text.types import ToolChoice

_BETWEEN = "__"
_INPUT = "input"
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_HEAD = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
_CHARS = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?!d[89ab])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})*', re.IGNORECASE
)
"""As much of the text of a JSON string as stands for whole characters."""


class DeclaredTool(NamedTuple):
    """A function that the prompt shows, and the client's tool that it stands for. `path` is the tool's field."""

    function: dict[str, Any]
    path: str
    name: str
    namespace: str = ""
    is_custom: bool = False


def declared_tools(fields: PromptFields) -> dict[str, DeclaredTool]:
    """Return the tools that the model may be shown, by the names of their functions. Raises INVALID for their names,
    and for too many."""
    found = [*_declare(fields.tools or (), "tools", "")]
    if len(found) > MAX_TOOLS:
        raise invalid(
            "tools", f"tools may have at most {MAX_TOOLS} functions with those in namespaces, got {len(found)}"
        )
    names = [tool.function["name"] for tool in found]
    check_tool_names(names, [f"{tool.path}.name" for tool in found])
    return dict(zip(names, found, strict=True))


def _declare(tools: Sequence[Any], path: str, namespace: str) -> Iterator[DeclaredTool]:
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if isinstance(tool, NamespaceTool):
            yield from _declare(tool.tools, f"{place}.tools", tool.name)
        elif isinstance(tool, ResponseTool):
            function = tool.model_dump(exclude_unset=True, exclude={"type"})
            yield DeclaredTool(_named(function, namespace), place, tool.name, namespace)
        elif isinstance(tool, CustomResponseTool):
            function = {"name": tool.name, "description": _description(tool), "parameters": _INPUT_SCHEMA}
            yield DeclaredTool(_named(function, namespace), place, tool.name, namespace, is_custom=True)


def _named(function: dict[str, Any], namespace: str) -> dict[str, Any]:
    return {**function, "name": function_name(function["name"], namespace)}


def function_name(name: str, namespace: str) -> str:
    """Return the name of the function that stands for a tool."""
    return f"{namespace.removesuffix(_BETWEEN)}{_BETWEEN}{name}" if namespace else name


def _description(tool: CustomResponseTool) -> str:
    """Return what a custom tool is for, with the grammar of its input, which the model is told and not held to."""
    form = tool.format
    grammar = "" if form is None or form.definition is None else f"The input matches this grammar:\n{form.definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


def tools_without_effect(fields: PromptFields) -> list[str]:
    """Return the places of the tools that the model is not shown, and of the formats that it is not held to."""
    return list(_ignored(fields.tools or (), "tools"))


def _ignored(tools: Sequence[Any], path: str) -> Iterator[str]:
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if isinstance(tool, NamespaceTool):
            yield from _ignored(tool.tools, f"{place}.tools")
        elif isinstance(tool, OtherTool):
            yield f"{place} ({tool.type})"
        elif isinstance(tool, CustomResponseTool) and tool.format is not None and tool.format.definition is not None:
            yield f"{place}.format"


def prompt_tools(fields: PromptFields) -> tuple[dict[str, Any], ...]:
    """Return the tools as chat templates have them; none where none may be called. Raises as `declared_tools`."""
    found = declared_tools(fields)
    if fields.tool_choice == "none":
        return ()
    return tuple({"type": "function", "function": tool.function} for tool in found.values())


def parse_tool_choice(fields: PromptFields) -> ToolChoice:
    """Return which of the tools may or must be called. Raises INVALID for those that are not among the tools."""
    choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if choice in (None, "none", "auto"):
        return ToolChoice(is_parallel=is_parallel)
    declared = declared_tools(fields)
    if not declared:
        raise invalid("tool_choice", "tool_choice must be 'none' or 'auto' without tools; send tools")
    if not isinstance(choice, ResponseToolChoice):
        return ToolChoice(is_required=True, is_parallel=is_parallel)
    is_named = choice.type != "allowed_tools"
    if is_named:
        names = {"tool_choice.name": choice.name or ""}
    else:
        names = {f"tool_choice.tools[{index}].name": tool.name for index, tool in enumerate(choice.tools or ())}
    functions = tuple(_chosen(declared, *each) for each in names.items())
    return ToolChoice(is_named or choice.mode == "required", is_parallel and not is_named, functions)


def _chosen(declared: Mapping[str, DeclaredTool], path: str, name: str) -> str:
    """Return the name of the function that stands for the tool `name`."""
    found = next((function for function, tool in declared.items() if name in (tool.name, function)), None)
    if found is None:
        raise invalid(path, f"{path} must be one of {', '.join(declared)}, got {quote_value(name)}")
    return found


def custom_arguments(text: str) -> str:
    """Return the arguments of the function of a custom tool that was called with `text`."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


class CustomInput:
    """Finds the input of a custom tool in the arguments of its function, which come in pieces."""

    def __init__(self) -> None:
        self._unread = ""
        self._has_begun = False

    def feed(self, piece: str) -> str:
        """Return the text that another piece of the arguments completes."""
        self._unread += piece
        if not self._has_begun:
            head = _HEAD.match(self._unread)
            if head is None:
                return ""
            self._has_begun, self._unread = True, self._unread[head.end() :]
        match = _CHARS.match(self._unread)
        assert match is not None, "it matches nothing, too"
        self._unread = self._unread[match.end() :]
        text: str = json.loads(f'"{match[0]}"', strict=False)
        return text

    def finish(self) -> str:
        """Return the rest of the text: the arguments as they are where a model that is held to no grammar wrote
        others."""
        return "" if self._has_begun else self._unread
