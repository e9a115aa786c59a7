"""Field names and types of requests to Anthropic's routes. As for OpenAI's, everything is strict."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.http.parsing import MAX_LIST, RequestObject, refuse_media_part, text_or_list, union_error

MAX_MODEL_CHARS = 1024
_ACCEPTED = "Accepted and not used."


class TextBlock(RequestObject):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")
    citations: list[Any] | None = Field(None, description=_ACCEPTED)


class ThinkingBlock(RequestObject):
    """A model's thoughts in an earlier turn. They are left out of the prompt, as Anthropic does."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str = ""


class RedactedThinkingBlock(RequestObject):
    """The same, unreadable."""

    type: Literal["redacted_thinking"]
    data: str = ""


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "thinking", "redacted_thinking") else None


_Text = Annotated[str, Tag("<text>")]
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(_block_kind, **union_error("a block of type text, thinking or redacted_thinking")),
    BeforeValidator(refuse_media_part),
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

    role: Literal["user", "assistant"]
    content: Content


class Thinking(RequestObject):
    """Whether the model thinks before it answers."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: int | None = Field(None, ge=1, description=_ACCEPTED)


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

    user_id: str | None = Field(None, description=_ACCEPTED)


class CountTokensRequest(RequestObject):
    """`POST /v1/messages/count_tokens`."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}]}'
    model: str = Field(max_length=MAX_MODEL_CHARS)
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: System | None = None
    thinking: Thinking | None = Field(None, description="adaptive is ignored; enabled is refused.")
    tools: list[Any] | None = Field(None, description="Refused, unless empty.")
    tool_choice: dict[str, Any] | None = Field(None, description=_ACCEPTED)


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'
    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MAX_LIST, fail_fast=True)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_ACCEPTED)
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: prefixes are always kept.")
