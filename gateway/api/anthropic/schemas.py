"""Field names and types of requests to Anthropic's routes. As for OpenAI's, everything is strict."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from sluice.engine.sampling_fields import SAMPLING_FIELDS
from sluice.gateway.api.anthropic.blocks import read_block
from sluice.gateway.api.fields import MAX_TOOLS, TOOL_NAME_HELP, SentArguments, ToolSchema, build_sampling_schema
from sluice.gateway.front.http.parsing import (
    MAX_LIST,
    RequestObject,
    WholeNumber,
    text_or_list,
    union_error,
)

MAX_MODEL_CHARS = 1024
_ACCEPTED = "Accepted and not used."


class TextBlock(RequestObject):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")
    citations: list[Any] | None = Field(None, description=_ACCEPTED)


class ImageSource(RequestObject):
    """Where an image is: in `data`, in base64, or at a URL that the server may fetch (--allowed-media-domains)."""

    type: Literal["base64", "url"]
    media_type: str | None = Field(None, description="Accepted and not used: the image itself says it.")
    data: str | None = None
    url: str | None = None


class ImageBlock(RequestObject):
    """An image, in a turn of the user, for models that take images."""

    type: Literal["image"]
    source: ImageSource
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")


class ThinkingBlock(RequestObject):
    """A model's thoughts in an earlier turn. Its chat template decides which of them are in the prompt."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str | None = Field("", description="Accepted and not used.")


class RedactedThinkingBlock(RequestObject):
    """The same, unreadable. They are left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str = ""


class OtherBlock(RequestObject):
    """A block of any other type, of which the model gets the text that it has: documents, search results, the results
    of tools that a server ran. A block without text is left out, and named in the header x-sluice-warning."""

    type: str
    text: SkipJsonSchema[str]
    unread: SkipJsonSchema[str]
    """The kind of content beside the block's text, such as an image; "" for none."""
    pdf: SkipJsonSchema[str]
    """The PDF of a document, in base64; "" for none."""

    @property
    def is_whole(self) -> bool:
        """Whether its text is all of it."""
        return bool(self.text) and not self.unread


def _kind_among(*known: str) -> Discriminator:
    """Return what finds the member of a union that a block belongs to: one of its own for the types that are `known`,
    and `OtherBlock` for any other."""

    def find(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in known:
            return f"<{kind}>"
        return "<other>" if isinstance(kind, str) else None

    words = union_error("a block, an object whose type is a string")
    return Discriminator(find, words["custom_error_type"], words["custom_error_message"])


_Text = Annotated[str, Tag("<text>")]
_TextMember = Annotated[TextBlock, Tag("<text>")]
_ImageMember = Annotated[ImageBlock, Tag("<image>")]
_OtherMember = Annotated[OtherBlock, BeforeValidator(read_block), Tag("<other>")]
ResultBlock = Annotated[_TextMember | _ImageMember | _OtherMember, _kind_among("text", "image")]
ResultContent = Annotated[
    _Text | Annotated[list[ResultBlock], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of blocks")),
]


class ToolUseBlock(RequestObject):
    """A call of a tool, in an earlier turn of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: SentArguments | None = None
    caller: dict[str, Any] | None = Field(None, description=_ACCEPTED)
    toolset_name: str | None = Field(None, description=_ACCEPTED)
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")


class ToolResultBlock(RequestObject):
    """The result of a tool call, in a turn of the user."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = Field(None, description=_ACCEPTED)
    toolset_name: str | None = Field(None, description=_ACCEPTED)
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")


Block = Annotated[
    _TextMember
    | _ImageMember
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | _OtherMember,
    _kind_among("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
Content = Annotated[
    _Text | Annotated[list[Block], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of blocks")),
]
PlainBlock = Annotated[_TextMember | _OtherMember, _kind_among("text")]
System = Annotated[
    _Text | Annotated[list[PlainBlock], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of text blocks")),
]


class Turn(RequestObject):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: Literal["next_user_message", "never"] | None = Field(
        None,
        description="Of the system: next_user_message takes the turn out of prompts with a later turn of the user.",
    )


class Thinking(RequestObject):
    """Whether the model thinks before it answers."""

    type: Literal["disabled", "adaptive", "enabled", "between_tools"]
    budget_tokens: WholeNumber | None = Field(
        None, ge=1, description="Most tokens of the thoughts. Anthropic's least, 1024, is not asked for."
    )
    display: str | None = Field(None, description="Accepted and not used: thoughts are in the answer.")


class CustomTool(RequestObject):
    """A function that the model may call."""

    type: Literal["custom"] | None = "custom"
    name: str = Field(description=TOOL_NAME_HELP)
    description: str | None = None
    input_schema: ToolSchema = Field(description="The JSON schema of its input, which every call matches.")
    strict: bool | None = Field(None, description="Unless false, inputs have no members that the schema does not name.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")
    defer_loading: bool | None = Field(
        None, description="Accepted: the prompt has all tools, so that it stays the same."
    )
    eager_input_streaming: bool | None = Field(None, description=_ACCEPTED)
    input_examples: list[Any] | None = Field(None, description=_ACCEPTED)
    allowed_callers: list[str] | None = Field(None, description=_ACCEPTED)


class BuiltInTool(RequestObject):
    """A tool that Anthropic defines. bash, text_editor and memory, which clients run, are functions with their schemas;
    the others are left out, and named in the header x-sluice-warning."""

    model_config = ConfigDict(extra="ignore")
    type: str
    name: str | None = None


def _tool_kind(value: Any) -> str | None:
    kind = value.get("type", None) if isinstance(value, dict) else ...
    if kind in (None, "custom"):
        return "<custom>"
    return "<built-in>" if isinstance(kind, str) else None


AnyTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[BuiltInTool, Tag("<built-in>")],
    Discriminator(_tool_kind, **union_error("a tool, an object whose type is a string")),
]


class ToolChoiceFields(RequestObject):
    """Whether the answer may or must use tools, or which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the type tool: its name.")
    disable_parallel_tool_use: bool | None = Field(None, description="Whether an answer uses at most one tool.")


class OutputFormat(RequestObject):
    """A schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestObject):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, description="How long the model thinks: low, medium, high, xhigh or max.")


class Metadata(RequestObject):
    """The person that a request is made for."""

    user_id: str | None = Field(
        None, description="The session, where no header names one; of Claude Code's, the part that names it."
    )


class Diagnostics(RequestObject):
    """Asks why a prompt was computed again."""

    previous_message_id: str | None = Field(
        None, description="Not used: the session's last request is what a request is compared with."
    )


class CountTokensRequest(RequestObject):
    """`POST /v1/messages/count_tokens`."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}]}'
    model: str = Field(max_length=MAX_MODEL_CHARS)
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: System | None = None
    thinking: Thinking | None = Field(
        None, description="Switches the reasoning on or off. It has no effect on a model that does not reason."
    )
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceFields | None = None
    output_config: OutputConfig | None = None


_SamplingFields: Any = build_sampling_schema(each for each in SAMPLING_FIELDS.values() if each.is_in_openai)


class MessagesRequest(CountTokensRequest, _SamplingFields):  # type: ignore[misc]  # its fields are a table's rows
    """`POST /v1/messages`, with the sampling fields of chat completions. Those for which an Anthropic answer has no
    place, or another name, are refused."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'
    max_tokens: WholeNumber = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MAX_LIST, fail_fast=True)
    bad_words: list[str] | None = Field(
        None, max_length=MAX_LIST, fail_fast=True, description="vLLM's; words that must not come."
    )
    output_format: OutputFormat | None = Field(None, description="An earlier name of output_config.format.")
    priority: WholeNumber | None = Field(None, ge=-(2**31), lt=2**31, description="vLLM's; lower runs earlier.")
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = Field(None, description="Asks why the prompt was computed again.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_ACCEPTED)
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")
    context_management: dict[str, Any] | None = Field(
        None, description="Accepted and not used: a prompt has all that was sent, so that its prefix stays the same."
    )
    betas: list[str] | None = Field(None, description=_ACCEPTED)
    container: Any = Field(None, description=_ACCEPTED)
    inference_geo: str | None = Field(None, description=_ACCEPTED)
    speed: str | None = Field(None, description=_ACCEPTED)
    stop: Any = Field(None, description="Refused: send stop_sequences.")
    response_format: Any = Field(None, description="Refused: send output_config.format.")
    structured_outputs: Any = Field(None, description="Refused: send output_config.format.")
    n: Any = Field(None, description="Refused, unless it is 1: a message is one answer.")
    best_of: Any = Field(None, description="Refused, unless it is 1: a message is one answer.")
    use_beam_search: Any = Field(None, description="Refused, unless it is false: send beam_width.")
    logprobs: Any = Field(None, description="Refused, unless it is false: chat completions have them.")
    prompt_logprobs: Any = Field(None, description="Refused: chat completions have them.")
