"""Turns, tools and tool choices of chat completions: their field names and types, and the conversation's they make."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sluice.errors import invalid
from sluice.gateway.api.fields import (
    MAX_TOOLS,
    TOOL_NAME_HELP,
    SentArguments,
    ToolSchema,
    check_tool_names,
    json_text,
)
from sluice.gateway.front.http.parsing import (
    RequestObject,
    TextPart,
    refuse_media_part,
    text_or_list,
    text_or_object,
    union_error,
)
from sluice.pipelines.text.types import ChatMessage, ImagePart, ToolCall, ToolChoice

Tools = tuple[dict[str, Any], ...]


class ImageUrl(RequestObject):
    """An image."""

    url: str = Field(description="A data: URL in base64, or one that the server may fetch (--allowed-media-domains).")
    detail: str | None = Field(None, description="Accepted and not used.")


class ImageUrlPart(RequestObject):
    """An image in a message, for models that take images."""

    type: Literal["image_url"]
    image_url: ImageUrl


class RefusalPart(RequestObject):
    """The model's refusal in an earlier answer, which is read as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_PART_TAGS = {"image_url": "<image part>", "refusal": "<refusal part>"}


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return _PART_TAGS.get(kind, "<text part>") if isinstance(kind, str) else "<text part>"


_TurnPart = Annotated[
    Annotated[TextPart, Tag("<text part>")]
    | Annotated[ImageUrlPart, Tag("<image part>")]
    | Annotated[RefusalPart, Tag("<refusal part>")],
    Discriminator(_part_tag),
    BeforeValidator(lambda value: value if _part_tag(value) == "<image part>" else refuse_media_part(value)),
]
TurnContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_TurnPart], Field(min_length=1, fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error('a string or an array of {"type": "text", "text": ...} parts')),
]


class CalledFunction(RequestObject):
    """A function that the model called, and its arguments as the text of a JSON object. Any other text is taken too:
    models write some, and answers are cut off."""

    name: str
    arguments: SentArguments | None = None

    @property
    def text(self) -> str:
        """The arguments as text, "" for none."""
        return "" if self.arguments is None else json_text(self.arguments)


class TurnCall(RequestObject):
    """A call in an earlier turn of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatTurn(RequestObject):
    """One turn of a conversation. Only an assistant's may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: TurnContent | None = None
    name: str | None = Field(None, description="The speaker, or the function whose result this is.")
    tool_calls: list[TurnCall] | None = Field(None, fail_fast=True, description="Of the role assistant.")
    tool_call_id: str | None = Field(None, description="Of the role tool: the call whose result this is.")
    function_call: CalledFunction | None = Field(None, description="tool_calls, as OpenAI had it earlier.")
    reasoning_content: str | None = Field(None, description="DeepSeek's and vLLM's: the reasoning before the answer.")
    reasoning: str | None = Field(None, description="The same, under vLLM's newer name.")
    refusal: str | None = Field(None, description="The content of a turn that has none.")


class FunctionDefinition(RequestObject):
    """A function that the model may call."""

    name: str = Field(description=TOOL_NAME_HELP)
    description: str | None = None
    parameters: ToolSchema | None = Field(None, description="The JSON schema of its arguments.")
    strict: bool | None = Field(
        None,
        description="Arguments always match the schema. Unless this is false, they also have no members that it does "
        "not name.",
    )


class FunctionTool(RequestObject):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestObject):
    """A function by its name."""

    name: str


class NamedTool(RequestObject):
    """A tool by its name."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(RequestObject):
    """The tools that the answer may call, or with the mode required must call one of."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class ToolChoiceObject(RequestObject):
    """One tool that the answer must call, or several that it may."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ToolChoiceObject, Tag("<object>")],
    Discriminator(text_or_object, **union_error("'none', 'auto', 'required' or an object")),
]
FunctionCallField = Annotated[
    Annotated[Literal["none", "auto"], Tag("<text>")] | Annotated[NamedFunction, Tag("<object>")],
    Discriminator(text_or_object, **union_error("'none', 'auto' or an object")),
]


class ToolFields(RequestObject):
    """The fields by which a conversation has tools."""

    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    functions: list[FunctionDefinition] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="tools, as OpenAI had them earlier."
    )
    function_call: FunctionCallField | None = Field(None, description="tool_choice, as OpenAI had it earlier.")


def parse_tools(fields: ToolFields) -> tuple[Tools, ToolChoice]:
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


def _parse_functions(fields: ToolFields) -> tuple[Tools, ToolChoice]:
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


def _parse_choice(fields: ToolFields, has_tools: bool) -> ToolChoice:
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
