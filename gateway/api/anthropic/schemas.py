"""Field names and types of requests to Anthropic's routes. As for OpenAI's, everything is strict."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sluice.engine.sampling_fields import SAMPLING_FIELDS
from sluice.gateway.api.fields import MAX_TOOLS, TOOL_NAME_HELP, SentArguments, ToolSchema, build_sampling_schema
from sluice.gateway.front.http.parsing import (
    MAX_LIST,
    RequestObject,
    WholeNumber,
    refuse_media_part,
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
    signature: str = ""


class RedactedThinkingBlock(RequestObject):
    """The same, unreadable. They are left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str = ""


_Text = Annotated[str, Tag("<text>")]
_TextOnly = Annotated[TextBlock, BeforeValidator(refuse_media_part)]
ResultContent = Annotated[
    _Text | Annotated[list[_TextOnly], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of text blocks")),
]


class ToolUseBlock(RequestObject):
    """A call of a tool, in an earlier turn of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: SentArguments | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")


class ToolResultBlock(RequestObject):
    """The result of a tool call, in a turn of the user."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = Field(None, description=_ACCEPTED)
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")


_KINDS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in _KINDS else None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_block_kind, **union_error(f"a block of type {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")),
    BeforeValidator(lambda value: value if _block_kind(value) == "<image>" else refuse_media_part(value)),
]
Content = Annotated[
    _Text | Annotated[list[Block], Field(min_length=1, fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of blocks")),
]
System = Annotated[
    _Text | Annotated[list[TextBlock], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of text blocks")),
]


class Turn(RequestObject):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Thinking(RequestObject):
    """Whether the model thinks before it answers."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: WholeNumber | None = Field(None, ge=1, description=_ACCEPTED)


class CustomTool(RequestObject):
    """A function that the model may call. Anthropic's own tools, which have another type, are refused."""

    type: Literal["custom"] = "custom"
    name: str = Field(description=TOOL_NAME_HELP)
    description: str | None = None
    input_schema: ToolSchema = Field(description="The JSON schema of its input, which every call matches.")
    strict: bool | None = Field(None, description="Unless false, inputs have no members that the schema does not name.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")


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
    effort: str | None = Field(None, description=_ACCEPTED)


class Metadata(RequestObject):
    """The person that a request is made for."""

    user_id: str | None = Field(None, description="The session, where no header names one.")


class CountTokensRequest(RequestObject):
    """`POST /v1/messages/count_tokens`."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}]}'
    model: str = Field(max_length=MAX_MODEL_CHARS)
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: System | None = None
    thinking: Thinking | None = Field(
        None, description="Switches the reasoning on or off. enabled is refused for a model that does not reason."
    )
    tools: list[CustomTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceFields | None = None


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
    output_config: OutputConfig | None = None
    priority: WholeNumber | None = Field(None, ge=-(2**31), lt=2**31, description="vLLM's; lower runs earlier.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_ACCEPTED)
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")
    stop: Any = Field(None, description="Refused: send stop_sequences.")
    response_format: Any = Field(None, description="Refused: send output_config.format.")
    structured_outputs: Any = Field(None, description="Refused: send output_config.format.")
    n: Any = Field(None, description="Refused, unless it is 1: a message is one answer.")
    best_of: Any = Field(None, description="Refused, unless it is 1: a message is one answer.")
    use_beam_search: Any = Field(None, description="Refused, unless it is false: send beam_width.")
    logprobs: Any = Field(None, description="Refused, unless it is false: chat completions have them.")
    prompt_logprobs: Any = Field(None, description="Refused: chat completions have them.")
