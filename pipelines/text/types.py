"""Requests to text models, the events that they answer with, and the parts of a chat's answer. Values are frozen."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from sluice.engine.types import FinishReason
from sluice.pipelines.text.citations import Citation, EncodingProgress, Source

OWNER_KEY = "collection_key"
"""The request parameter that carries the owner key of the collection that a pipeline looks into."""
OWNER_KEY_HEADER = "x-sluice-collection-key"
"""The HTTP header that carries one."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which the chat templates of Qwen and DeepSeek switch the reasoning on and off."""
EFFORT_ARGUMENT, BUDGET_ARGUMENT = "reasoning_effort", "thinking_budget"
"""Arguments by which those of gpt-oss and Seed-OSS take how long the model reasons. Where a template takes neither, and
where none switches the reasoning off, the server closes the reasoning itself."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a function that the model made. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class ImagePart(msgspec.Struct, frozen=True):
    """An image in a message: a data: URL, or one that the server may fetch. `path` is the field in the client's
    request."""

    url: str
    path: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation. Roles are checked where the model's chat template is rendered.

    `content` is its text; a turn with images has `parts` too, them and the text in order. An assistant's turn may have
    `tool_calls` and the `reasoning` before its answer. A tool's turn has the `content` that the call `tool_call_id` of
    the function `name` returned.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[str | ImagePart, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True):
    """Which of a conversation's tools the answer may or must call: only those in `names` where there are some. A call
    is required or not (`is_required`), and more than one allowed or not (`is_parallel`)."""

    is_required: bool = False
    is_parallel: bool = True
    names: tuple[str, ...] = ()


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a chat template is rendered with, besides the messages.

    `tools` are functions in OpenAI's form, `{"type": "function", "function": {...}}`; `documents` are objects with a
    title and a text; `template` replaces the model's own; `arguments` are further variables of the template;
    `image_placeholders` stand for images where the template takes text alone. Without
    `adds_generation_prompt` the text ends after the last message; with `continues_final_message` it ends within it.
    """

    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, Any], ...] = ()
    template: str | None = None
    arguments: dict[str, Any] = {}
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    image_placeholders: tuple[str, ...] = ()


class Conversation(msgspec.Struct, frozen=True):
    """Messages to answer, and how the model's chat template turns them into text."""

    messages: tuple[ChatMessage, ...]
    options: TemplateOptions = TemplateOptions()
    notes: tuple[str, ...] = ()
    """What of the client's request is read otherwise than it was sent, or left out, each with its path."""

    def with_notes(self, notes: Iterable[str]) -> "Conversation":
        return Conversation(self.messages, self.options, (*self.notes, *notes))

    @property
    def images(self) -> list[ImagePart]:
        return [part for each in self.messages if each.parts for part in each.parts if isinstance(part, ImagePart)]


PlainPrompt = str | list[int] | Conversation
"""Text to continue, token ids to continue, or a conversation to answer."""


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt with its token ids, so that several requests for it tokenize it once. `images` are the files of its
    images, for each of which the ids have a placeholder."""

    source: PlainPrompt
    token_ids: list[int]
    images: tuple[bytes, ...] = ()


Prompt = PlainPrompt | EncodedPrompt


SamplingOverrides = dict[str, Any]
"""The sampling fields that the client sent, by their names in `sluice.engine.types.SamplingParams`.

The model's defaults hold for the others. Without `max_tokens` a text may take what the context and the KV cache leave
after the prompt, but no more than the request's `default_max_tokens`.
"""


class TextForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the generated tokens that an answer shows, under vLLM's names.

    `include_stop_str_in_output` shows the stop string or stop token that ended the text. Special tokens have no text
    unless `skip_special_tokens` is false; then `spaces_between_special_tokens` matters to tokenizers that write such
    spaces. With `return_token_ids` events have the tokens' ids.
    """

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False


class PromptForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt becomes token ids, under vLLM's names. None in `add_special_tokens`: a text gets the tokenizer's
    special tokens, and a conversation does not. With `truncate_prompt_tokens` its last tokens are kept, so many at
    most; -1 stands for all that the context holds besides `num_reserved`."""

    suffix: str = ""
    """The text that the answer shall lead to; "" for none. For models that can fill in a middle."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    num_reserved: int = 1
    salt: str = ""
    """The `cache_salt`: what is known of the beginnings of prompts is shared by those of one salt alone."""


AS_IT_IS = PromptForm()
"""The whole prompt, with the special tokens that it usually gets."""


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one text. The text ends before the first of the `stop` strings and has none of the `bad_words`.

    The weights of `biased_words` are added to the logits of those words' tokens, on top of `sampling.logit_bias`. With
    `echo` the text begins with the prompt, and requested log probabilities begin with those of the prompt's tokens.
    With `echo` and a `max_tokens` of 0 the text is the prompt alone.
    Priority, tenant, salt, timeouts and adapter are those of `sluice.engine.types.GenerateRequest`. `parameters` are
    further request parameters of a pipeline (`collection`, `top_k`, `filter`, ...); a language model alone refuses
    them.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingOverrides = {}
    default_max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    biased_words: tuple[tuple[str, float], ...] = ()
    thinking_token_budget: int | None = None
    """Most tokens of the reasoning; None for any."""
    requires_budget: bool = True
    """Whether the request is refused where the model cannot keep to that budget, which has no effect there else."""
    echo: bool = False
    prediction: str = ""
    """A text that the answer is likely to repeat; it changes no token. "" for none."""
    structural_tag: str = ""
    """vLLM's, as JSON, in place of `sampling.grammar`; "" for none."""
    form: TextForm = TextForm()
    prompt_form: PromptForm = AS_IT_IS
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    session: str = ""
    """The client's name of the session, by which one replica gets the tenant's requests of it; "" for none."""
    parent_session: str = ""
    """The client's name of the session that started this one, as an agent does its subagents; "" for none."""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    adapter: str = ""
    tool_choice: ToolChoice = ToolChoice()
    """Has an effect with tools in the conversation. Without a choice to call none: leave out the tools."""
    parameters: dict[str, str | int | float | bool] = {}
    protocol: str = ""
    """The protocol's label in metrics, for models that are measured behind the text model."""
    returns_metrics: bool = False
    returns_context_logits: bool = False
    returns_generation_logits: bool = False
    """These ask a language model's engine for more in its events, as in `sluice.engine.types.GenerateRequest`."""


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """A token and the text it stands for by itself. `text` has U+FFFD where `spelled` is only part of a character."""

    token_id: int
    text: str
    spelled: bytes


class TextLogprob(msgspec.Struct, frozen=True):
    """One token's log probability, None for a prompt's first, and the likeliest alternatives, best first. `start` is
    the offset of the token's text in the request's text, in characters."""

    token: TokenText
    logprob: float | None
    start: int
    top: tuple[tuple[TokenText, float], ...] = ()


class Retrieval(msgspec.Struct, frozen=True):
    """The sources that a pipeline retrieved: `sources` are in the prompt, `dropped` did not fit into it. `citations`
    say which part of the answer rests on which source. They come with the last event only; sources come with the event
    before the first text, and again with the last one. `encoding` is None unless the search came while documents of its
    collection were being encoded, so that it may have missed some."""

    sources: tuple[Source, ...] = ()
    dropped: tuple[Source, ...] = ()
    citations: tuple[Citation, ...] = ()
    encoding: EncodingProgress | None = None


class CacheMissReason(StrEnum):
    """Why tokens of a prompt were computed that the prefix cache could have had."""

    FIRST_REQUEST = "first_request"
    MODEL_CHANGED = "model_changed"
    ADAPTER_CHANGED = "adapter_changed"
    CACHE_SALT_CHANGED = "cache_salt_changed"
    TEMPLATE_CHANGED = "template_changed"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    MESSAGES_CHANGED = "messages_changed"
    PROMPT_CHANGED = "prompt_changed"
    RENDERING_CHANGED = "rendering_changed"
    """The messages are the same, and the chat template writes one of them in another way than before."""
    EVICTED = "evicted"
    ANOTHER_REPLICA = "another_replica"
    NOT_IN_CACHE = "not_in_cache"
    """The cache has lost the tokens, and does not tell when: it was restarted, or keeps nothing, or too long ago."""
    NOT_LOOKED_UP = "not_looked_up"
    """Log probabilities of a prompt need all of it computed."""


class CacheMiss(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why `missed_tokens` of a session's prompt were computed again, from `token` on: `at` names what is another than
    in the session's last prompt, and `character` the beginning of the first 64 characters there that are."""

    reason: CacheMissReason
    missed_tokens: int
    token: int
    at: str = ""
    character: int | None = None
    before: str = ""
    """The model, adapter or replica of the session's last prompt."""
    evicted_s: float | None = None
    """Seconds since the first of these tokens left the cache."""
    evicted_for: str = ""
    """The session for whose tokens it left, or a description of it."""


class TextDetail(msgspec.Struct, frozen=True):
    """Details of an event that few requests ask for.

    `logprobs` belong to the tokens whose text begins in the event; a token that ended the text without being
    shown has none. `total_logprob` is the sum over all tokens so far, including that one. `prompt_logprobs` come
    with the first event. `retrieval` comes from pipelines, on an event before the first text and on the last one.
    `prompt_end` is the end of the prompt's text, with the first event of an answer for a `ChatReader`.
    `cache_miss` comes with the first event and the last one, where a session's prompt was not cached as it could be.
    `token_starts` are the offsets in the whole text, in characters, at which its tokens begin, with the last event of
    an answer whose `ChatReader` finds reasoning. `token_ids` are those generated since the previous event, whether or
    not they show in its text, and `prompt_token_ids` come with the first event, where the request asks for ids.
    """

    logprobs: list[TextLogprob] | None = None
    total_logprob: float = 0.0
    prompt_logprobs: list[TextLogprob] | None = None
    retrieval: Retrieval | None = None
    prompt_end: str = ""
    token_starts: Sequence[int] = ()
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    """Draft tokens of a request that `returns_metrics`, on its last event: those tried, and those of them that came."""
    logits: bytes = b""
    """The model's own for the tokens of the event, [tokens, vocab_size] float32, of a request that
    `returns_generation_logits`."""
    target: str = ""
    """The target of a route that answers, with the first event of an answer for a `ChatReader`."""
    cache_miss: CacheMiss | None = None


class TextEvent(msgspec.Struct, frozen=True, gc=False):
    """A piece of generated text. Only the last event of a request has a finish reason.

    `text` is empty where the tokens complete none: half a character, or what may begin a stop string. `num_tokens`
    counts the tokens generated since the previous event, whether or not they show in `text`. `stop_reason` is the
    requested stop string or stop token id that ended the text; None for the model's own end of sequence.
    `prompt_tokens` and `completion_tokens` are totals up to and including this event. `cached_tokens` counts prompt
    tokens that were found in the prefix cache. A pipeline's counts are 0 except on the last event, and 0 there too
    where its model does not count.
    """

    text: str
    num_tokens: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    detail: TextDetail | None = None


ENDED_EARLY = (FinishReason.CANCELLED, FinishReason.ERROR)
"""Reasons for which the engine, not the client, ended a request. The client must not see a clean end."""


class AnswerText(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer's text."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """A piece of the reasoning before the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a tool call. Calls are numbered from 0 in an answer."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = AnswerText | ReasoningText | CallStart | CallArguments


class ChatReader(Protocol):
    """Finds the parts of one answer. The joined parts never depend on how the text was split. Only the answer's task
    uses it."""

    @property
    def finds_reasoning(self) -> bool:
        """Whether the model reasons, in a format that the reader knows."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the answer's tokens are reasoning, without the marks around it; known after the last event."""
        ...

    @property
    def relaxed(self) -> list[str]:
        """Constraints of the tools' schemas that calls are not held to, each with its place."""
        ...

    def read(self, event: TextEvent) -> list[Part]:
        """Return the parts that an event of the answer completes, all that is left with the last event."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Return the parts that more text completes. Text that may still become another part is kept back."""
        ...

    def finish(self) -> list[Part]:
        """Return the parts of the text kept back, at the end of the text."""
        ...
