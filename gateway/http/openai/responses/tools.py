"""The tools of a response: those that its prompt shows, and the choice among them."""

from typing import Any

from gateway.http.openai.responses.schemas import PromptFields, ResponseToolChoice
from gateway.http.parsing import quote_value
from gateway.http.tools import check_tool_names
from pipelines.text.types import ToolChoice
from sluice.errors import invalid


def prompt_tools(fields: PromptFields) -> tuple[dict[str, Any], ...]:
    """Return the tools as chat templates have them; none where none may be called. Raises INVALID for their names."""
    check_tool_names([tool.name for tool in fields.tools or ()], "tools[{}].name")
    if fields.tool_choice == "none":
        return ()
    sent = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in fields.tools or ()]
    return tuple({"type": "function", "function": function} for function in sent)


def parse_tool_choice(fields: PromptFields) -> ToolChoice:
    """Return which of the tools may or must be called. Raises INVALID for those that are not among the tools."""
    choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if choice in (None, "none", "auto"):
        return ToolChoice(is_parallel=is_parallel)
    if not fields.tools:
        raise invalid("tool_choice", "tool_choice must be 'none' or 'auto' without tools; send tools")
    if not isinstance(choice, ResponseToolChoice):
        return ToolChoice(is_required=True, is_parallel=is_parallel)
    if choice.type == "function":
        names = {"tool_choice.name": choice.name or ""}
    else:
        names = {f"tool_choice.tools[{index}].name": tool.name for index, tool in enumerate(choice.tools or ())}
    known = [tool.name for tool in fields.tools]
    for path, name in names.items():
        if name not in known:
            raise invalid(path, f"{path} must be one of {', '.join(known)}, got {quote_value(name)}")
    is_named = choice.type == "function"
    return ToolChoice(is_named or choice.mode == "required", is_parallel and not is_named, tuple(names.values()))
