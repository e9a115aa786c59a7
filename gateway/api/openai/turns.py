"""Turns, tools and tool choices of chat completions: their field names and types, and the conversation's they make."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sluice.errors import invalid
from sluice.gateway.api.fields import (
    MAX_TOOLS,
    TOOL_NAME_HELP,
    SentArguments,
    ToolSchema,
    choose_tools,
    json_text,
    offered_tools,
)
from sluice.gateway.front.http.parsing import (
    MEDIA_PARTS,
    RequestObject,
    TextPart,
    media_refusal,
    quote_value,
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


class OtherPart(RequestObject):
    """A part of any other type. The text that it has is kept. All else is left out with a warning, and refused where it
    is a medium in the user's last message."""

    type: str
    sent: dict[str, Any]
    """All of the part."""

    @property
    def text(self) -> str:
        text = self.sent.get("text")
        return text if isinstance(text, str) else ""

    @property
    def reasoning(self) -> str:
        """The model's reasoning, as Mistral's and Anthropic's clients send it; "" in all other parts."""
        thinking = self.sent.get("thinking")
        parts = thinking if isinstance(thinking, list) else [{"text": thinking}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("image_url", "refusal"):
        return f"<{kind} part>"
    is_text = not isinstance(kind, str) or (kind == "text" and value.get("text", "") is not None)
    return "<text part>" if is_text else "<other part>"


_TurnPart = Annotated[
    Annotated[TextPart, Tag("<text part>")]
    | Annotated[ImageUrlPart, Tag("<image_url part>")]
    | Annotated[RefusalPart, Tag("<refusal part>")]
    | Annotated[OtherPart, BeforeValidator(lambda part: {"type": part["type"], "sent": part}), Tag("<other part>")],
    Discriminator(_part_tag),
]
TurnContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_TurnPart], Field(fail_fast=True), Tag("<list>")],
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


def _as_id(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value


CallId = Annotated[str | None, BeforeValidator(_as_id)]
"""The id of a call. A missing one is made up."""


class CalledCustomTool(RequestObject):
    """A tool that takes a text, and the text that the model called it with."""

    name: str
    input: str = ""


class TurnCall(RequestObject):
    """A call in an earlier turn of the assistant."""

    id: CallId = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = Field(None, description="Of the type custom; its input is the only argument.")


class ChatTurn(RequestObject):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: TurnContent | None = None
    name: str | None = Field(None, description="The speaker, or the function whose result this is.")
    tool_calls: list[TurnCall] | None = Field(None, fail_fast=True, description="Of the role assistant.")
    tool_call_id: CallId = Field(
        None, description="Of the role tool: the call whose result this is, by default the next one without a result."
    )
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


class ParsedTools(NamedTuple):
    """The tools, as the client sent them, none where none may be called; the choice among them; and notes of those that
    are left out."""

    tools: Tools
    choice: ToolChoice
    notes: tuple[str, ...] = ()


def parse_tools(fields: ToolFields) -> ParsedTools:
    """Return the tools and the choice among them. Raises INVALID for fields that contradict each other."""
    if fields.functions:
        return _parse_functions(fields)
    if fields.function_call not in (None, "none", "auto"):
        raise invalid("function_call", "function_call names a function, and there are no functions; send functions")
    tools = fields.tools or []
    offered = offered_tools([tool.function.name for tool in tools], "tools[{}].function.name")
    tools = offered.of(tools)
    choice = _parse_choice(fields, [tool.function for tool in tools])
    if fields.tool_choice == "none":
        return ParsedTools((), choice)
    return ParsedTools(tuple(tool.model_dump(exclude_unset=True) for tool in tools), choice, offered.notes)


def _parse_functions(fields: ToolFields) -> ParsedTools:
    """Return OpenAI's earlier `functions` and `function_call` as tools and a choice of one call."""
    functions, choice = fields.functions or [], fields.function_call
    if fields.tools:
        raise invalid("functions", "functions and tools are the same under an old and a new name; send tools")
    offered = offered_tools([function.name for function in functions], "functions[{}].name")
    functions = offered.of(functions)
    if choice == "none":
        return ParsedTools((), ToolChoice())
    tools = tuple({"type": "function", "function": each.model_dump(exclude_unset=True)} for each in functions)
    named = {"function_call.name": choice.name} if isinstance(choice, NamedFunction) else {}
    chosen = choose_tools(_by_name(functions), named, is_required=bool(named), is_parallel=False)
    return ParsedTools(tools, chosen, offered.notes)


def _parse_choice(fields: ToolFields, offered: Sequence[FunctionDefinition]) -> ToolChoice:
    choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    functions = _by_name(offered)
    if not isinstance(choice, ToolChoiceObject):
        return choose_tools(functions, is_required=choice == "required", is_parallel=is_parallel)
    if choice.type == "function":
        if choice.function is None:
            raise invalid("tool_choice.function", "tool_choice.function is required where its type is function")
        named = {"tool_choice.function.name": choice.function.name}
        return choose_tools(functions, named, is_required=True, is_parallel=False)
    if choice.allowed_tools is None:
        raise invalid("tool_choice.allowed_tools", "tool_choice.allowed_tools is required where its type is that")
    allowed, path = choice.allowed_tools, "tool_choice.allowed_tools.tools[{}].function.name"
    named = {path.format(index): tool.function.name for index, tool in enumerate(allowed.tools)}
    return choose_tools(functions, named, is_required=allowed.mode == "required", is_parallel=is_parallel)


def _by_name(functions: Sequence[FunctionDefinition]) -> dict[str, str]:
    return {function.name: function.name for function in functions}


class ChatTurnReader:
    """Reads the turns of a conversation. What it reads otherwise than it was sent it notes."""

    def __init__(self, turns: Sequence[ChatTurn]) -> None:
        self._turns = turns
        self._last_question = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
        self._unanswered: list[str] = []
        """Ids of the assistant's last calls that have no result yet."""
        self.notes: list[str] = []

    def read(self) -> tuple[ChatMessage, ...]:
        """Return the messages. Raises INVALID for a turn that its role cannot have, and for a sound or a file in the
        user's last message."""
        return tuple([self._read(turn, index) for index, turn in enumerate(self._turns)])

    def _read(self, turn: ChatTurn, index: int) -> ChatMessage:
        path, role = f"messages[{index}]", turn.role
        calls = tuple(_calls(turn, index))
        if calls and role != "assistant":
            name = f"{path}.tool_calls" if turn.tool_calls else f"{path}.function_call"
            raise invalid(name, f"{name} needs the role assistant, got {role}")
        if not turn.content and turn.content != "" and role not in ("assistant", "function"):
            self.notes.append(f"{path}.content {'null' if turn.content is None else '[]'} is read as no text")
        if calls:
            self._unanswered = [call.id for call in calls]
        texts, parts, thoughts = self._contents(turn, index)
        return ChatMessage(
            role,
            "".join(texts) or (turn.refusal or "" if turn.content is None else ""),
            reasoning=turn.reasoning_content or turn.reasoning or "".join(thoughts),
            tool_calls=calls,
            tool_call_id=self._result_id(turn, path) if role == "tool" else turn.tool_call_id or "",
            name=turn.name or "",
            parts=tuple(parts) if any(isinstance(part, ImagePart) for part in parts) else (),
        )

    def _result_id(self, turn: ChatTurn, path: str) -> str:
        """Return the id of the call whose result a turn has: the next one without, where it does not say."""
        found = turn.tool_call_id
        if found is None:
            found = self._unanswered[0] if self._unanswered else ""
            whose = f"the result of {found!r}" if found else "that of no call"
            self.notes.append(f"{path}.tool_call_id is missing, so it is {whose}")
        if found in self._unanswered:
            self._unanswered.remove(found)
        return found

    def _contents(self, turn: ChatTurn, index: int) -> tuple[list[str], list[str | ImagePart], list[str]]:
        """Return the texts of a turn, its texts and images in order, and what the model thought."""
        if turn.content is None or isinstance(turn.content, str):
            return [turn.content or ""], [], []
        parts: list[str | ImagePart] = []
        thoughts: list[str] = []
        for number, part in enumerate(turn.content):
            path = f"messages[{index}].content[{number}]"
            if isinstance(part, ImageUrlPart) and turn.role == "user":
                parts.append(ImagePart(part.image_url.url, f"{path}.image_url"))
            elif isinstance(part, ImageUrlPart):
                parts.append("[image]")
                self.notes.append(f"{path}.image_url is left out: images need the role user, got {turn.role}")
            elif isinstance(part, OtherPart):
                if part.reasoning and turn.role == "assistant":
                    thoughts.append(part.reasoning)
                else:
                    parts.append(self._other_text(part, path, is_new=index >= self._last_question))
            else:
                parts.append(part.text)
        return [part for part in parts if isinstance(part, str)], parts, thoughts

    def _other_text(self, part: OtherPart, path: str, *, is_new: bool) -> str:
        """Return what the model reads in place of a part."""
        if part.text:
            self.notes.append(f"{path} has the type {quote_value(part.type)} and is read as its text")
            return part.text
        if part.type in MEDIA_PARTS and is_new:
            raise media_refusal(path, part.type, part.sent)
        self.notes.append(f"{path} is left out: its type is {quote_value(part.type)}")
        return f"[{part.type}]" if part.type in MEDIA_PARTS else ""


def _calls(turn: ChatTurn, index: int) -> Iterator[ToolCall]:
    for number, call in enumerate(turn.tool_calls or ()):
        call_id = f"call_{index}_{number}" if call.id is None else call.id
        if call.function is not None:
            yield ToolCall(call_id, call.function.name, call.function.text)
        elif call.custom is not None:
            yield ToolCall(call_id, call.custom.name, json_text({"input": call.custom.input}))
        else:
            path = f"messages[{index}].tool_calls[{number}].function"
            raise invalid(path, f"{path} is required")
    if turn.function_call is not None:
        yield ToolCall("", turn.function_call.name, turn.function_call.text)
