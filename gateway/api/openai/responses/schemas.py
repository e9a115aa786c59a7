"""Field names and types of requests to /v1/responses and /v1/conversations. As for the other routes, all is strict."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, model_serializer, model_validator
from pydantic_core import CoreSchema

from sluice.gateway.api.fields import MAX_TOOLS, ToolSchema
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, UNUSED, GenerationRequest
from sluice.gateway.api.openai.turns import RefusalPart
from sluice.gateway.front.http.parsing import RequestObject, WholeNumber, text_or_list, text_or_object, union_error

MAX_ITEMS = 1 << 14
"""Most items of one input: checking many more would hold up all other streams."""
MAX_ADDED_ITEMS = 20
"""Most items that one request adds to a conversation: OpenAI's limit."""
_MAX_ID_CHARS = 4096
"""Most characters of an item's id. Other makers put what they keep of the item into it."""
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_CALL_ITEMS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_ITEMS = ("message", *_CALL_ITEMS, "reasoning", "item_reference")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SentObject(RequestObject):
    """An object of a type that has no schema here. `sent` is all of it."""

    type: str
    sent: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def keep(cls, value: Any) -> Any:
        return {"type": value["type"], "sent": value}

    @model_serializer
    def as_sent(self) -> dict[str, Any]:
        return self.sent

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        kind = {"title": "Type", "type": "string"}
        return {"title": cls.__name__, "type": "object", "properties": {"type": kind}, "required": ["type"]}


class TextItemPart(RequestObject):
    """A piece of text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = Field(None, description=UNUSED)
    logprobs: list[Any] | None = Field(None, description=UNUSED)


class InputImagePart(RequestObject):
    """An image in a turn of the user, for models that take images."""

    type: Literal["input_image"]
    image_url: str = Field(description="A data: URL in base64, or one that the server may fetch.")
    detail: str | None = Field(None, description=UNUSED)


class OtherResultPart(SentObject):
    """A part of a result that is no text, such as a file: the model gets its type in place of it."""


def _part_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("refusal", "input_image"):
        return f"<{kind}>"
    return "<text part>" if kind in _TEXT_PARTS else None


def _result_part_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    is_image = kind == "input_image" and isinstance(value.get("image_url"), str)
    return "<input_image>" if is_image else "<text part>" if kind in _TEXT_PARTS else "<other>"


ItemPart = Annotated[
    Annotated[TextItemPart, Tag("<text part>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(
        _part_kind,
        **union_error("a part of type input_text, output_text or refusal; images, files and audio are not supported"),
    ),
]
_MessagePart = Annotated[
    Annotated[TextItemPart, Tag("<text part>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[InputImagePart, Tag("<input_image>")],
    Discriminator(
        _part_kind,
        **union_error(
            "a part of type input_text, input_image, output_text or refusal; files and audio are not supported"
        ),
    ),
]
MessageContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_MessagePart], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of parts")),
]
_ResultPart = Annotated[
    Annotated[TextItemPart, Tag("<text part>")]
    | Annotated[InputImagePart, Tag("<input_image>")]
    | Annotated[OtherResultPart, Tag("<other>")],
    Discriminator(_result_part_kind, **union_error("an object with a type, such as input_text")),
]
ResultContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_ResultPart], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of parts")),
]


class ItemFields(RequestObject):
    """The fields that all items have."""

    id: str | None = Field(None, max_length=_MAX_ID_CHARS)
    status: str | None = Field(None, description=UNUSED)
    phase: str | None = Field(None, description=UNUSED)
    caller: Any = Field(None, description=UNUSED)
    created_by: Any = Field(None, description=UNUSED)
    async_: Any = Field(None, alias="async", description=UNUSED)
    internal_chat_message_metadata_passthrough: Any = Field(None, description="Codex' own; not used.")


class MessageItem(ItemFields):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent


class FunctionCallItem(ItemFields):
    """A call of a function that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = Field(None, description="The namespace of the function.")


class FunctionCallOutputItem(ItemFields):
    """The value that a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    name: str | None = Field(None, description=UNUSED)
    namespace: str | None = Field(None, description=UNUSED)
    output: ResultContent


class CustomToolCallItem(ItemFields):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = Field(None, description="The namespace of the tool.")


class CustomToolCallOutputItem(ItemFields):
    """The value that a custom tool returned."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    name: str | None = Field(None, description=UNUSED)
    namespace: str | None = Field(None, description=UNUSED)
    output: ResultContent


class ReasoningItem(ItemFields):
    """The model's reasoning before an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ItemPart] | None = Field(None, fail_fast=True)
    content: list[ItemPart] | None = Field(None, fail_fast=True)
    encrypted_content: str | None = Field(None, description="Reasoning as an answer of this server has it.")


class ItemReference(RequestObject):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str = Field(max_length=_MAX_ID_CHARS)


class OtherItem(SentObject):
    """An item of any other type. What of it a model can read is known where its prompt is made."""


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference"
    if not isinstance(kind, str):
        return None
    return f"<{kind}>" if kind in _ITEMS else "<other>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomToolCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(_item_kind, **union_error("an object with a type, such as message")),
]
InputItems = Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class ToolWithName(RequestObject):
    """The fields that functions and custom tools share."""

    name: str
    description: str | None = None
    defer_loading: bool | None = Field(None, description="Accepted and not used: the model is shown every tool.")
    allowed_callers: list[Any] | None = Field(None, description=UNUSED)
    async_: bool | None = Field(None, alias="async", description=UNUSED)


class ResponseTool(ToolWithName):
    """A function that the model may call."""

    type: Literal["function"]
    parameters: ToolSchema | None = None
    strict: bool | None = None
    output_schema: Any = Field(None, description=UNUSED)


class CustomFormat(RequestObject):
    """The form of a custom tool's input. The model is held to a regular expression. It is told a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomResponseTool(ToolWithName):
    """A tool that takes a text."""

    type: Literal["custom"]
    format: CustomFormat | None = None


class OtherTool(SentObject):
    """A tool that is built into a client, which the model is shown as a function, or into OpenAI's servers."""


def _tool_tag(value: Any) -> str | None:
    """Return the member of the union that a tool belongs to, as JSON or as the object that is written back."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return f"<{kind}>" if kind in ("function", "custom", "namespace") else "<other>"


_NamedTool = Annotated[
    Annotated[ResponseTool, Tag("<function>")]
    | Annotated[CustomResponseTool, Tag("<custom>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(
        lambda value: None if _tool_tag(value) == "<namespace>" else _tool_tag(value),
        **union_error("a tool of type function or custom"),
    ),
]


class NamespaceTool(RequestObject):
    """Functions and custom tools under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = Field(None, description=UNUSED)
    tools: list[_NamedTool] = Field(max_length=MAX_TOOLS, fail_fast=True)


SentTool = Annotated[
    Annotated[ResponseTool, Tag("<function>")]
    | Annotated[CustomResponseTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_tool_tag, **union_error("an object with a type, such as function")),
]


class ChosenTool(RequestObject):
    """A tool by its name, or by its type where that is built in."""

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = Field(None, description=UNUSED)


class ResponseToolChoice(ChosenTool):
    """One tool that the answer must call, or several that it may."""

    type: str
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenTool] | None = Field(None, min_length=1, max_length=MAX_TOOLS, fail_fast=True)


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ResponseToolChoice, Tag("<object>")],
    Discriminator(text_or_object, **union_error("'none', 'auto', 'required' or an object")),
]


class TextFormat(RequestObject):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description=UNUSED)
    description: str | None = Field(None, description=UNUSED)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Refuses a schema that no grammar keeps to in full.")


class TextConfig(RequestObject):
    """The form and the length of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="An argument of the chat template.")


class Reasoning(RequestObject):
    """How long the model thinks before it answers."""

    effort: Effort | None = Field(None, description="Arguments of the chat template.")
    summary: str | None = Field(None, description="Accepted and not used: reasoning comes whole.")
    generate_summary: str | None = Field(None, description=UNUSED)
    context: str | None = Field(None, description=UNUSED)


class ContextManagement(RequestObject):
    """When a long prompt is compacted."""

    type: Literal["compaction"]
    compact_threshold: WholeNumber | None = Field(None, ge=1, description="In tokens of the prompt.")


class ConversationReference(RequestObject):
    """A conversation by its id."""

    id: str


_Conversation = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[ConversationReference, Tag("<object>")],
    Discriminator(text_or_object, **union_error("an id, as a string or as an object")),
]
_Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[InputItems, Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of items")),
]


class PromptFields(RequestObject):
    """The fields of a prompt, which creating a response and counting its tokens share."""

    input: _Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: _Conversation | None = None
    tools: list[SentTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: _ToolChoice | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto drops the oldest items of a prompt that is too long."
    )
    parallel_tool_calls: bool | None = None


class PromptCacheOptions(RequestObject):
    """How prompts are cached: always, where they begin as others did."""

    mode: Literal["implicit", "explicit"] | None = Field(None, description=UNUSED)
    ttl: str | None = Field(None, description=UNUSED)
    comparison_response_id: str | None = Field(
        None,
        description="Asks for prompt_cache_diagnostics. They compare with the last response of the session, whichever "
        "is named.",
    )


class CreateResponseRequest(PromptFields, GenerationRequest):
    """`POST /v1/responses`. Fields of chat completions that have another name here are refused."""

    example = '{"model": "rill", "input": "Hello!", "max_output_tokens": 50}'

    max_output_tokens: WholeNumber | None = Field(None, ge=1)
    max_tool_calls: WholeNumber | None = Field(
        None, ge=1, lt=2**31, description="Accepted and not used: this server runs no tools."
    )
    top_logprobs: WholeNumber | None = Field(None, ge=0, le=20)
    include: list[str] | None = Field(
        None,
        max_length=32,
        description="message.output_text.logprobs adds log probabilities, reasoning.encrypted_content the reasoning "
        "as the next request may send it; others change nothing here.",
    )
    context_management: list[ContextManagement] | None = Field(
        None,
        max_length=8,
        fail_fast=True,
        description="A prompt of more tokens than compact_threshold is compacted before it is answered.",
    )
    client_metadata: dict[str, Any] | None = Field(None, description=UNUSED)
    background: bool | None = Field(None, description="Answer at once and generate on: needs the store.")
    store: bool | None = Field(None, description="Whether the response is kept; true where absent.")
    metadata: Metadata | None = None
    prompt_cache_options: PromptCacheOptions | None = Field(
        None, description="comparison_response_id asks why the prompt was computed again; nothing else has an effect."
    )
    prompt: Any = Field(None, description="Refused: this server keeps no prompt templates.")
    max_tokens: Any = Field(None, description="Refused: send max_output_tokens.")
    response_format: Any = Field(None, description="Refused: send text.format.")
    n: Any = Field(None, description="Refused, unless it is 1: a response is one answer.")
    best_of: Any = Field(None, description="Refused, unless it is 1: a response is one answer.")
    beam_width: Any = Field(None, description="Refused, unless it is 1: send beams to chat completions.")
    use_beam_search: Any = Field(None, description="Refused, unless it is false: send beams to chat completions.")
    prompt_logprobs: Any = Field(None, description="Refused: chat completions have them.")
    return_token_ids: Any = Field(None, description="Refused, unless it is false: chat completions have them.")
    return_tokens_as_token_ids: Any = Field(
        None, description="Refused, unless it is false: chat completions have them."
    )


class CompactRequest(CreateResponseRequest):
    """`POST /v1/responses/compact`."""

    example = '{"model": "rill", "input": [{"role": "user", "content": "Hello!"}]}'


class CountInputRequest(PromptFields):
    """`POST /v1/responses/input_tokens`."""

    example = '{"model": "rill", "input": "What is a block table?"}'

    model: str = Field(max_length=MAX_MODEL_CHARS)


class CreateConversationRequest(RequestObject):
    """`POST /v1/conversations`."""

    example = '{"items": [{"role": "user", "content": "Hello!"}], "metadata": {"topic": "demo"}}'

    items: Annotated[list[InputItem], Field(max_length=MAX_ADDED_ITEMS, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class UpdateConversationRequest(RequestObject):
    """`POST /v1/conversations/{conversation_id}`."""

    example = '{"metadata": {"topic": "demo"}}'

    metadata: Metadata | None


class AddItemsRequest(RequestObject):
    """`POST /v1/conversations/{conversation_id}/items`."""

    example = '{"items": [{"role": "user", "content": "Hello!"}]}'

    items: list[InputItem] = Field(min_length=1, max_length=MAX_ADDED_ITEMS, fail_fast=True)
