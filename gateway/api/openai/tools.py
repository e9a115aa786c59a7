"""From the tools and the turns of a chat request to those of a conversation."""

from collections.abc import Sequence
from typing import Any

from sluice.errors import invalid
from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.gateway.api.openai.tool_schemas import ChatTurn, FunctionDefinition, ImageUrlPart, ToolChoiceObject
from sluice.gateway.api.tools import check_tool_names
from sluice.pipelines.text.types import ChatMessage, ImagePart, ToolCall, ToolChoice

Tools = tuple[dict[str, Any], ...]


def parse_tools(fields: ChatCompletionRequest) -> tuple[Tools, ToolChoice]:
    """Return the tools, as the client sent them, and the choice among them; no tools where none may be called. Raises
    INVALID for fields that contradict each other."""
    if fields.functions:
        return _parse_functions(fields)
    if fields.function_call not in (None, "none", "auto"):
        raise invalid("function_call", "function_call names a function, and there are no functions; send functions")
    tools = fields.tools or []
    check_tool_names([tool.function.name for tool in tools], "tools[{}].function.name")
    choice = _parse_choice(fields, bool(tools))
    return () if fields.tool_choice == "none" else tuple(tool.model_dump(exclude_unset=True) for tool in tools), choice


def _parse_functions(fields: ChatCompletionRequest) -> tuple[Tools, ToolChoice]:
    """Return OpenAI's earlier `functions` and `function_call` as tools and a choice of one call."""
    functions, choice = fields.functions or [], fields.function_call
    if fields.tools:
        raise invalid("functions", "functions and tools are the same under an old and a new name; send tools")
    check_tool_names([function.name for function in functions], "functions[{}].name")
    if choice == "none":
        return (), ToolChoice()
    tools = tuple({"type": "function", "function": each.model_dump(exclude_unset=True)} for each in functions)
    if choice is None or isinstance(choice, str):
        return tools, ToolChoice(is_parallel=False)
    _check_names([choice.name], functions, "function_call.name")
    return tools, ToolChoice(is_required=True, is_parallel=False, names=(choice.name,))


def _parse_choice(fields: ChatCompletionRequest, has_tools: bool) -> ToolChoice:
    choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if choice in (None, "none", "auto"):
        return ToolChoice(is_parallel=is_parallel)
    if not has_tools:
        raise invalid("tool_choice", "tool_choice must be 'none' or 'auto' without tools; send tools")
    if not isinstance(choice, ToolChoiceObject):
        return ToolChoice(is_required=True, is_parallel=is_parallel)
    functions = [tool.function for tool in fields.tools or ()]
    if choice.type == "function":
        if choice.function is None:
            raise invalid("tool_choice.function", "tool_choice.function is required where its type is function")
        _check_names([choice.function.name], functions, "tool_choice.function.name")
        return ToolChoice(is_required=True, is_parallel=False, names=(choice.function.name,))
    if choice.allowed_tools is None:
        raise invalid("tool_choice.allowed_tools", "tool_choice.allowed_tools is required where its type is that")
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    _check_names(names, functions, "tool_choice.allowed_tools.tools[{}].function.name")
    return ToolChoice(choice.allowed_tools.mode == "required", is_parallel, tuple(names))


def _check_names(names: Sequence[str], functions: Sequence[FunctionDefinition], path: str) -> None:
    known = [function.name for function in functions]
    for index, name in enumerate(names):
        if name not in known:
            place = path.format(index)
            raise invalid(place, f"{place} must be one of {', '.join(known)}, got {name[:80]!r}")


def parse_turn(turn: ChatTurn, index: int) -> ChatMessage:
    """Return a turn that may have more than a role and a content. Raises INVALID for one without what its role needs,
    and for what its role cannot have."""
    path, role = f"messages[{index}]", turn.role
    if turn.content is None and role not in ("assistant", "function"):
        raise invalid(f"{path}.content", f"{path}.content is required")
    if role == "tool" and turn.tool_call_id is None:
        raise invalid(f"{path}.tool_call_id", f"{path}.tool_call_id is required where the role is tool")
    if role == "function" and turn.name is None:
        raise invalid(f"{path}.name", f"{path}.name is required where the role is function")
    calls = [ToolCall(call.id, call.function.name, call.function.text) for call in turn.tool_calls or ()]
    if turn.function_call is not None:
        calls.append(ToolCall("", turn.function_call.name, turn.function_call.text))
    if calls and role != "assistant":
        name = f"{path}.tool_calls" if turn.tool_calls else f"{path}.function_call"
        raise invalid(name, f"{name} needs the role assistant, got {role}")
    return ChatMessage(
        role,
        _text(turn),
        reasoning=turn.reasoning_content or turn.reasoning or "",
        tool_calls=tuple(calls),
        tool_call_id=turn.tool_call_id or "",
        name=turn.name or "",
        parts=_parts(turn, path),
    )


def _text(turn: ChatTurn) -> str:
    if turn.content is None or isinstance(turn.content, str):
        return turn.content or turn.refusal or ""
    return "".join(part.text for part in turn.content if not isinstance(part, ImageUrlPart))


def _parts(turn: ChatTurn, path: str) -> tuple[str | ImagePart, ...]:
    """Return the parts of a turn with images, none of one without."""
    parts = [] if turn.content is None or isinstance(turn.content, str) else turn.content
    paths = [f"{path}.content[{i}].image_url" for i, part in enumerate(parts) if isinstance(part, ImageUrlPart)]
    if paths and turn.role != "user":
        raise invalid(paths[0], f"{paths[0]} needs the role user, got {turn.role}")
    rest = iter(paths)
    found = [
        ImagePart(each.image_url.url, next(rest)) if isinstance(each, ImageUrlPart) else each.text for each in parts
    ]
    return tuple(found) if paths else ()
