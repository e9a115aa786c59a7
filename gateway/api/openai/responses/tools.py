"""The tools of a response: the functions that its prompt shows for them, and the choice among them.

The model knows functions alone. A custom tool is one with a text as its only argument, the tools of a namespace have
that in front of their names, and a tool that is built into clients has the arguments of its calls. A tool that runs on
OpenAI's servers is not shown.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from sluice.errors import invalid
from sluice.gateway.api.fields import MAX_TOOLS, OfferedTools, choose_tools, need_tools, offered_tools, one_of
from sluice.gateway.api.openai.responses.client_tools import CLIENT_TOOLS, client_function
from sluice.gateway.api.openai.responses.schemas import (
    ChosenTool,
    CustomResponseTool,
    NamespaceTool,
    OtherTool,
    PromptFields,
    ResponseTool,
    ResponseToolChoice,
    SentTool,
)
from sluice.gateway.front.http.parsing import quote_value
from sluice.pipelines.text.types import ToolChoice

_BETWEEN = "__"
_INPUT = "input"
_HEAD = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
_CHARS = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?!d[89ab])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})*', re.IGNORECASE
)
"""As much of the text of a JSON string as stands for whole characters."""
_OF_FUNCTION = ("name", "description", "parameters", "strict")
"""Fields of a function that the model is shown. They are taken as they are: a copy of each schema takes long."""
_CHOICES = ("function", "custom", "allowed_tools", *CLIENT_TOOLS)
_MAX_PATTERN_CHARS = 4096
_TOOL_ITEMS = ("tool_search_output", "additional_tools")
"""Types of items that bring more tools."""


class DeclaredTool(NamedTuple):
    """A function that the prompt shows, and the client's tool that it stands for. `path` is the tool's field, `kind`
    its type."""

    function: dict[str, Any]
    path: str
    name: str
    namespace: str = ""
    kind: str = "function"


DeclaredTools = Mapping[str, DeclaredTool]
"""Tools by the names of their functions."""


def declared_tools(fields: PromptFields, items: Iterable[Mapping[str, Any]] = ()) -> DeclaredTools:
    """Return the tools that the model may be shown, of the request and of stored `items` that bring some.

    Raises INVALID for too many.
    """
    found = [*_declare(fields.tools or (), "tools", "")]
    named = [tool for tool in found if tool.kind not in CLIENT_TOOLS]
    if len(found) > MAX_TOOLS:
        raise invalid(
            "tools", f"tools may have at most {MAX_TOOLS} functions with those in namespaces, got {len(found)}"
        )
    taken = {tool.function["name"]: tool for tool in _offered(named).of(named)}
    # A function of the client's own is shown in place of a built-in tool of its name.
    names = [tool.function["name"] for tool in found]
    shown = [(name, taken.get(name, tool)) for name, tool in zip(names, found, strict=True)]
    declared = {name: tool for name, tool in shown if name in taken or tool.kind in CLIENT_TOOLS}
    for item in items:
        if item["type"] in _TOOL_ITEMS and len(declared) < MAX_TOOLS:
            declared |= _brought_tools(item, declared)  # at the end: what was shown before stays a known prefix
    return declared


def _brought_tools(item: Mapping[str, Any], known: DeclaredTools) -> dict[str, DeclaredTool]:
    """Return the tools of an item but for those that are `known`, and for what is none: the item may be many turns
    old."""
    brought: dict[str, DeclaredTool] = {}
    sent = item.get("tools")
    for value in sent[: MAX_TOOLS - len(known)] if isinstance(sent, list) else ():
        if isinstance(value, dict) and value.get("type") != "namespace" and value.get("name") in known:
            continue
        try:
            tools = [*_declare([_tool_adapter().validate_python(value)], "input", "")]
        except ValidationError:
            continue
        brought |= {name: tool for tool in _offered(tools).of(tools) if (name := tool.function["name"]) not in known}
    return brought


def _offered(tools: Sequence[DeclaredTool]) -> OfferedTools:
    return offered_tools([tool.function["name"] for tool in tools], [f"{tool.path}.name" for tool in tools])


def left_out_tools(fields: PromptFields) -> tuple[str, ...]:
    """Return notes of the tools that the model is not shown because of their names."""
    return _offered([tool for tool in _declare(fields.tools or (), "tools", "") if tool.kind not in CLIENT_TOOLS]).notes


@cache
def _tool_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(SentTool)


def _declare(tools: Sequence[Any], path: str, namespace: str) -> Iterator[DeclaredTool]:
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if isinstance(tool, NamespaceTool):
            yield from _declare(tool.tools, f"{place}.tools", tool.name)
        elif isinstance(tool, ResponseTool):
            function = {name: getattr(tool, name) for name in _OF_FUNCTION if name in tool.model_fields_set}
            yield DeclaredTool(_named(function, namespace), place, tool.name, namespace)
        elif isinstance(tool, CustomResponseTool):
            function = {"name": tool.name, "description": _description(tool), "parameters": _input_schema(tool)}
            yield DeclaredTool(_named(function, namespace), place, tool.name, namespace, "custom")
        elif isinstance(tool, OtherTool) and (client := client_function(tool)) is not None:
            yield DeclaredTool(client, place, tool.type, kind=tool.type)


def _named(function: dict[str, Any], namespace: str) -> dict[str, Any]:
    return {**function, "name": function_name(function["name"], namespace)}


def function_name(name: str, namespace: str) -> str:
    """Return the name of the function that stands for a tool."""
    return f"{namespace.removesuffix(_BETWEEN)}{_BETWEEN}{name}" if namespace else name


def _description(tool: CustomResponseTool) -> str:
    """Return what a custom tool is for, with the grammar of its input."""
    form = tool.format
    grammar = "" if form is None or form.definition is None else f"The input matches this grammar:\n{form.definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


def _input_schema(tool: CustomResponseTool) -> dict[str, Any]:
    """Return the arguments of a custom tool. Its input is held to a regular expression, and to no grammar: what that
    generates would have to be escaped, as it is in a JSON string."""
    pattern = _input_pattern(tool)
    properties = {_INPUT: {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}}
    return {"type": "object", "properties": properties, "required": [_INPUT], "additionalProperties": False}


def _has_grammar(tool: CustomResponseTool) -> bool:
    return tool.format is not None and tool.format.definition is not None


def _input_pattern(tool: CustomResponseTool) -> str | None:
    """Return the regular expression of a custom tool's input; None without one, and for one that cannot be read."""
    form = tool.format
    if form is None or form.syntax != "regex" or not form.definition or len(form.definition) > _MAX_PATTERN_CHARS:
        return None
    pattern = f"^(?:{form.definition})$"
    with suppress(re.error, OverflowError, RecursionError):
        re.compile(pattern)
        return pattern
    return None


def tools_without_effect(fields: PromptFields, declared: DeclaredTools) -> list[str]:
    """Return the places of the tools that the model is not shown, and of the formats that it is not held to."""
    shown = {tool.path for tool in declared.values()}
    choice = fields.tool_choice
    chosen = choice.tools or () if isinstance(choice, ResponseToolChoice) else ()
    functions = _functions_by_name(declared) if chosen else {}
    others = [
        f"tool_choice.tools[{number}] ({each.type})"
        for number, each in enumerate(chosen)
        if each.type != "namespace" and _key(each) not in functions
    ]
    return [*_ignored(fields.tools or (), "tools", shown), *others]


def _ignored(tools: Sequence[Any], path: str, shown: set[str]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if isinstance(tool, NamespaceTool):
            yield from _ignored(tool.tools, f"{place}.tools", shown)
        elif isinstance(tool, OtherTool) and place not in shown:
            yield f"{place} ({tool.type})"
        elif isinstance(tool, CustomResponseTool) and _has_grammar(tool) and _input_pattern(tool) is None:
            yield f"{place}.format"


def prompt_tools(fields: PromptFields, declared: DeclaredTools) -> tuple[dict[str, Any], ...]:
    """Return the tools as chat templates have them; none where none may be called."""
    choice = fields.tool_choice
    if choice == "none" or (isinstance(choice, ResponseToolChoice) and not _functions(choice, declared)):
        return ()
    return tuple({"type": "function", "function": tool.function} for tool in declared.values())


def parse_tool_choice(fields: PromptFields, declared: DeclaredTools) -> ToolChoice:
    """Return which of the tools may or must be called. Raises INVALID for those that are not among the tools, unless
    others may be called and none must."""
    choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if choice in (None, "none", "auto"):
        return ToolChoice(is_parallel=is_parallel)
    if not isinstance(choice, ResponseToolChoice):
        return choose_tools({name: name for name in declared}, is_required=True, is_parallel=is_parallel)
    names = _functions(choice, declared)
    is_one = choice.type != "allowed_tools"
    return ToolChoice(is_one or choice.mode == "required", is_parallel and not is_one, names)


def _functions(choice: ResponseToolChoice, declared: DeclaredTools) -> tuple[str, ...]:
    """Return the functions of the chosen tools. Raises INVALID for a tool that is none, but for those of servers where
    others may be called."""
    if choice.type not in _CHOICES:
        kinds = f"{', '.join(_CHOICES[:-1])} or {_CHOICES[-1]}"
        reason = f"this server runs no tools, got {quote_value(choice.type)}; send 'auto', or {kinds}"
        raise invalid("tool_choice.type", f"tool_choice.type must be of a tool that the client runs: {reason}")
    if choice.type != "allowed_tools" or choice.mode == "required":
        need_tools(declared)
    functions = _functions_by_name(declared)
    if choice.type != "allowed_tools":
        return (_chosen(functions, "tool_choice", choice),)
    found: list[str] = []
    for index, each in enumerate(choice.tools or ()):
        if each.type == "namespace":
            found += [function for function, tool in declared.items() if tool.namespace == each.name]
        elif _key(each) in functions or each.type in ("function", "custom"):
            found.append(_chosen(functions, f"tool_choice.tools[{index}]", each))
    if not found and choice.mode == "required":
        raise invalid("tool_choice.tools", f"tool_choice.tools must have {one_of(declared)}")
    return tuple(found)


def _functions_by_name(declared: DeclaredTools) -> dict[tuple[str, str], str]:
    """Return the names of functions by what a choice may call them: a name and "", or a name and its namespace."""
    found: dict[tuple[str, str], str] = {}
    for function, tool in declared.items():
        for key in ((tool.name, ""), (function, ""), (tool.name, tool.namespace)):
            found.setdefault(key, function)
    return found


def _key(choice: ChosenTool) -> tuple[str, str]:
    name = choice.type if choice.type in CLIENT_TOOLS and choice.name is None else choice.name
    return name or "", choice.namespace or ""


def _chosen(functions: Mapping[tuple[str, str], str], path: str, choice: ChosenTool) -> str:
    """Return the name of the function that stands for a chosen tool."""
    if (found := functions.get(_key(choice))) is None:
        known = one_of(dict.fromkeys(functions.values()))
        raise invalid(f"{path}.name", f"{path}.name must be {known}, got {quote_value(choice.name or '')}")
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
