"""Field names and types of requests to the OpenAI routes.

Everything is strict: "5" is no number and 1 is no boolean. The allowed values are decided where they are used
(`sluice.engine.validation`, `sluice.pipelines.text`), so that every protocol refuses the same ones in the same words.
Null counts as absent. Lists fail fast, because only the first error is reported.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticKnownError

from sluice.engine.sampling_fields import MAX_LOGPROBS, SAMPLING_FIELDS
from sluice.gateway.api.fields import build_sampling_schema
from sluice.gateway.api.openai.turns import ChatTurn, ToolFields
from sluice.gateway.front.http.parsing import (
    MAX_LIST,
    MAX_MESSAGES,
    Content,
    RequestObject,
    StopStrings,
    WholeNumber,
    text_or_object,
    union_error,
)

MAX_PROMPTS = 512
"""Most prompts in one completion request: each is a sequence of its own."""

MAX_CHOICES = 128
"""Most answers to one prompt: OpenAI's limit."""

MAX_SEQUENCES = 512
"""Most sequences of one request: prompts times answers."""

MAX_PROMPT_TOKENS = 1 << 20
"""Most token ids in one prompt, far above any context: checking many millions would hold up all other streams."""

_INLINE_IDS = 16 << 10
"""Most token ids that pydantic checks at once."""

MAX_MODEL_CHARS = 1024
_OF_TAG = "Of a structural_tag, vLLM's."
MAX_TEMPLATE_CHARS = 1 << 16
MAX_TEMPLATE_ARGUMENTS = 64
UNUSED = "Accepted and not used."


def prompt_kind(value: Any) -> str | None:
    """Return the member of `Prompt` that the value's first element belongs to."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<id lists>"
    return "<ids>" if isinstance(first, int) else "<texts>"


def _check_token_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check many token ids in pieces: the checks of pydantic keep the interpreter's lock, 50 ms for a million."""
    if not isinstance(value, list) or len(value) <= _INLINE_IDS:
        return check(value)
    if len(value) > MAX_PROMPT_TOKENS:
        lengths = {"field_type": "List", "max_length": MAX_PROMPT_TOKENS, "actual_length": len(value)}
        raise PydanticKnownError("too_long", lengths)
    starts = range(0, len(value), _INLINE_IDS)
    return value if all(set(map(type, value[i : i + _INLINE_IDS])) == {int} for i in starts) else check(value)


TokenIds = Annotated[
    list[int],
    Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True),
    WrapValidator(_check_token_ids),
]

SomeTokenIds = Annotated[
    list[int], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True), WrapValidator(_check_token_ids)
]
"""Any number of token ids, also none."""

JsonText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(text_or_object, **union_error("a JSON schema, as an object or as text")),
]

Choices = Annotated[list[str], Field(min_length=1, max_length=1 << 15, fail_fast=True)]


class StreamOptions(RequestObject):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="vLLM's; with include_usage, counts in every chunk.")
    include_obfuscation: bool | None = Field(None, description=UNUSED)


class JsonSchema(RequestObject):
    """The schema that an answer must match."""

    name: str = Field(description=UNUSED)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Refuses a schema that no grammar keeps to in full.")


class ResponseFormat(RequestObject):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = Field(
        default=None, fail_fast=True, description="Of a structural_tag, vLLM's."
    )
    triggers: list[str] | None = Field(default=None, fail_fast=True, description=_OF_TAG)
    format: dict[str, Any] | None = Field(default=None, description=_OF_TAG)


class StructuredOutputs(RequestObject):
    """vLLM's constraints. One of the fields says what the output must match."""

    json_: JsonText | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="A grammar in EBNF.")
    json_object: bool | None = None
    structural_tag: JsonText | None = Field(None, description="Text with parts between tags that match schemas.")
    whitespace_pattern: str | None = Field(
        None, max_length=64, description="A regular expression: JSON may have it, or nothing, between any two tokens."
    )
    disable_any_whitespace: bool | None = Field(None, description="true: JSON has no white space between its tokens.")
    disable_additional_properties: bool | None = Field(
        None, description="true: objects have no members but those that the JSON schema names."
    )


class RetrievalFields(RequestObject):
    """Where and how a pipeline retrieves documents. Null and absent fields: as the pipeline is configured."""

    collection: str | None = None
    top_k: WholeNumber | None = Field(None, ge=1, description="How many chunks to find.")
    filter: dict[str, Any] | None = Field(None, description="Conditions on the documents' metadata.")
    mode: Literal["vector", "bm25", "hybrid"] | None = None


class LoraRequest(RequestObject):
    """A LoRA adapter, as trtllm-serve and vLLM name one."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(None, description=UNUSED)
    lora_path: str | None = Field(None, description="Accepted and not used: adapters are given at the start.")


_SamplingFields: Any = build_sampling_schema(each for each in SAMPLING_FIELDS.values() if each.is_in_openai)


class GenerationRequest(_SamplingFields):  # type: ignore[misc]  # its fields are a table's rows
    """The fields that chat and plain completions share, besides those of `sluice.engine.sampling_fields`."""

    model: str = Field(max_length=MAX_MODEL_CHARS, description="The model; base:adapter for one of its LoRA adapters.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: WholeNumber | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Answers to each prompt. Answer i has seed + i."
    )
    max_tokens: WholeNumber | None = Field(None, ge=1)
    stop: StopStrings | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, description="The session, where neither a header nor `prompt_cache_key` names one.")
    safety_identifier: str | None = Field(None, description=UNUSED)
    metadata: dict[str, Any] | None = Field(None, description=UNUSED)
    store: bool | None = Field(None, description="true is accepted with a warning: no answer is stored.")
    prompt_cache_key: str | None = Field(
        None,
        max_length=MAX_MODEL_CHARS,
        description="Requests with the same key get the same version of a model whose versions share them, as with "
        "the header x-sluice-sticky, which wins; and one of its replicas where they are one session.",
    )
    prompt_cache_retention: str | None = Field(None, description=UNUSED)
    service_tier: Literal["auto", "default", "flex", "priority", "fast", "ultrafast", "scale"] | None = Field(
        None, description="priority and fast run before default and flex after it. The field priority wins."
    )
    bad_words: list[str] | None = Field(
        None, max_length=MAX_LIST, fail_fast=True, description="vLLM's; words that must not come."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="vLLM's; whether the prompt gets the tokenizer's special tokens: by default a text does, and a "
        "conversation does not, since its template writes them.",
    )
    truncate_prompt_tokens: WholeNumber | None = Field(
        None, ge=-1, description="vLLM's; keep the last so many tokens of the prompt; -1: as many as fit."
    )
    prompt_logprobs: WholeNumber | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="vLLM's; of the prompt's tokens."
    )
    return_token_ids: bool | None = Field(None, description="vLLM's; the ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="vLLM's; log probabilities name tokens token_id:N, which tells all apart."
    )
    skip_special_tokens: bool | None = Field(None, description="vLLM's; false: special tokens show in the text.")
    spaces_between_special_tokens: bool | None = Field(
        None, description="vLLM's; false: no spaces between special tokens that show."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="vLLM's; the text ends after the stop string or token instead of before it."
    )
    guided_json: JsonText | None = Field(None, description="vLLM's; a JSON schema.")
    guided_regex: str | None = Field(None, description="vLLM's; a regular expression.")
    guided_choice: Choices | None = Field(None, description="vLLM's; the possible outputs.")
    guided_grammar: str | None = Field(None, description="vLLM's; a grammar in EBNF.")
    guided_whitespace_pattern: str | None = Field(
        None, max_length=64, description="vLLM's; as structured_outputs.whitespace_pattern."
    )
    structured_outputs: StructuredOutputs | None = None
    structural_tag: JsonText | None = Field(None, description="vLLM's; as structured_outputs.structural_tag.")
    use_beam_search: bool | None = Field(
        None, description="vLLM's; the best beam is the answer. With TensorRT-LLM alone."
    )
    best_of: WholeNumber | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Of plain completions: generate so many and answer with the n likeliest; not with stream. "
        "With use_beam_search the beams.",
    )
    lora_request: LoraRequest | None = Field(None, description="A LoRA adapter of the model, by its name.")
    priority: WholeNumber | None = Field(None, ge=-(2**31), lt=2**31, description="vLLM's; lower runs earlier.")
    cache_salt: str | None = Field(
        None, max_length=256, description="vLLM's; prompts are reused only between requests of one salt."
    )
    rag: RetrievalFields | None = Field(None, description="Sluice's; for pipelines that retrieve documents.")


class TemplateFields(RequestObject):
    """vLLM's fields of conversations."""

    add_generation_prompt: bool | None = Field(
        None, description="vLLM's; whether the prompt goes up to where the answer begins, as by default."
    )
    continue_final_message: bool | None = Field(
        None, description="vLLM's; the answer goes on with the last message. Not with add_generation_prompt."
    )
    documents: list[dict[str, Any]] | None = Field(
        None, fail_fast=True, description="vLLM's; texts for a chat template that takes documents; else refused."
    )
    chat_template: str | None = Field(
        None,
        max_length=MAX_TEMPLATE_CHARS,
        description="vLLM's; in place of the model's own. With --trust-request-chat-template alone.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_TEMPLATE_ARGUMENTS, description="vLLM's; further variables of the chat template."
    )


class Prediction(RequestObject):
    """A text that the answer is likely to repeat."""

    type: Literal["content"]
    content: Content


class ChatCompletionRequest(GenerationRequest, TemplateFields, ToolFields):
    """`POST /v1/chat/completions`."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'
    messages: list[ChatTurn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="An argument of the chat template, else a budget. none and minimal switch the reasoning off."
    )
    thinking_token_budget: WholeNumber | None = Field(
        None,
        ge=-1,
        lt=2**31,
        description="vLLM's; the most tokens of the reasoning, which tags must enclose. -1 is any.",
    )
    include_reasoning: bool | None = Field(None, description="vLLM's; false: the answer has no reasoning.")
    max_completion_tokens: WholeNumber | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="An argument of the chat template. A template that does not use it: a warning."
    )
    prediction: Prediction | None = Field(
        None, description="A text that the answer is likely to repeat, which makes it faster with prompt lookup."
    )


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<id lists>")],
    Discriminator(
        prompt_kind,
        **union_error("a string, an array of strings, an array of token ids or an array of arrays of token ids"),
    ),
]


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    example = '{"model": "rill", "prompt": "A block table is", "max_tokens": 20}'
    prompt: Prompt
    logprobs: WholeNumber | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Of each token and this many of the likeliest."
    )
    max_tokens: WholeNumber | None = Field(None, ge=0, description="0 with echo alone: the text is the prompt.")
    echo: bool | None = Field(None, description="Whether the text begins with the prompt.")
    suffix: str | None = Field(
        None, description="What the text shall lead to, for models that can fill in a middle. Not with echo."
    )
