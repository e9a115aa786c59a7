"""What a protocol asks of a text model and gets back. All values are frozen."""

import msgspec

from engine.types import FinishReason, Grammar
from pipelines.text.sources import Citation, Source


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation. The roles that a model takes are checked where its template is rendered."""

    role: str
    content: str


PlainPrompt = str | list[int] | tuple[ChatMessage, ...]
"""Text to continue, token ids to continue, or a conversation to answer."""


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt whose token ids are known already, so that several requests for it need them worked out once."""

    source: PlainPrompt
    token_ids: list[int]


Prompt = PlainPrompt | EncodedPrompt


class SamplingOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling fields that the client sent. None: not sent, so the model's default holds.

    Names and ranges are those of `engine.types.SamplingParams`. `max_tokens` None means all that the
    context and the KV cache leave after the prompt. From `beam_width` on they are `runtime_fields.RUNTIME_FIELDS`.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    beam_search_diversity_rate: float | None = None
    no_repeat_ngram_size: int | None = None
    top_p_min: float | None = None
    top_p_decay: float | None = None
    top_p_reset_ids: int | None = None


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One text to generate. Generation ends before the first of the `stop` strings, and none of `bad_words` comes.
    Tokens of `biased_words` get those words' weights added to their logits, beside what `sampling.logit_bias` says.

    With `echo` the text begins with the prompt's, and the log probabilities (where asked for) with those
    of the prompt's tokens. Priority, tenant, salt, timeouts and adapter are those of `engine.types.GenerateRequest`.
    `parameters` are further request parameters of a pipeline (`collection`, `top_k`, `filter`, ...); a language
    model alone refuses them.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingOverrides = SamplingOverrides()
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    biased_words: tuple[tuple[str, float], ...] = ()
    echo: bool = False
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    adapter: str = ""
    parameters: dict[str, str | int | float | bool] = {}
    protocol: str = ""
    """Its label in the metrics, where what runs behind the model keeps them."""


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """A token and what it stands for by itself. `text` has U+FFFD where `spelled` is but a part of a character."""

    token_id: int
    text: str
    spelled: bytes


class TextLogprob(msgspec.Struct, frozen=True):
    """One token's log probability, and the likeliest alternatives, best first.

    `start` is where the token's text begins in the text of the request, in characters. The first token
    of a prompt has no log probability, since nothing precedes it.
    """

    token: TokenText
    logprob: float | None
    start: int
    top: tuple[tuple[TokenText, float], ...] = ()


class Retrieval(msgspec.Struct, frozen=True):
    """What a pipeline found for its answer: `sources` are in the prompt, `dropped` did not fit into it.

    `citations` say which part of the answer rests on which source. They come with the last event alone, the
    others with the one before the first text and again with the last.
    """

    sources: tuple[Source, ...] = ()
    dropped: tuple[Source, ...] = ()
    citations: tuple[Citation, ...] = ()


class TextDetail(msgspec.Struct, frozen=True):
    """What few requests ask for.

    `logprobs` are those of the tokens whose text begins in the event; a token that ended the text without being
    shown has none. `total_logprob` sums those of all tokens so far, that one included. `prompt_logprobs` come
    with the first event. `retrieval` is a pipeline's: on an event before the first text, and on the last.
    """

    logprobs: list[TextLogprob] | None = None
    total_logprob: float = 0.0
    prompt_logprobs: list[TextLogprob] | None = None
    retrieval: Retrieval | None = None


class TextEvent(msgspec.Struct, frozen=True, gc=False):
    """A piece of generated text. Only the last event of a request has a finish reason.

    `text` is empty on no event but the last, and on the one that only tells what was retrieved. `num_tokens` counts
    the tokens generated since the event before, whether or not they show in `text`. `stop_reason` is the stop string
    or the stop token id that the request named and that ended it; None for the model's own end of sequence. The two
    totals are up to and with this event; those of the last one are the request's. `cached_tokens` are those of the
    prompt that needed no computing. A pipeline's counts are 0 but on the last event, and there where its model
    does not count.
    """

    text: str
    num_tokens: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    detail: TextDetail | None = None
