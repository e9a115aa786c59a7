"""Field names and types of turns, tools and tool choices in requests to chat completions."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sluice.gateway.api.tools import MAX_TOOLS, TOOL_NAME_HELP, SentArguments, ToolSchema, arguments_text
from sluice.gateway.front.http.parsing import (
    RequestObject,
    TextPart,
    refuse_media_part,
    text_or_list,
    text_or_object,
    union_error,
)


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
        return "" if self.arguments is None else arguments_text(self.arguments)


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
