"""The values that enter and leave an engine: requests in, token events out. They are frozen msgspec structs, so that an
engine process reads and writes them as msgpack without a second set of wire types."""

from enum import StrEnum

import msgspec

from sluice.errors import ErrorCode, SluiceError


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class GrammarKind(StrEnum):
    """The languages in which a constraint on the output may be written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    TOOL_CALLS = "tool_calls"


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """A constraint that the whole output must match. `text` is a JSON schema, a regular expression, a JSON array of
    strings (choice) or a grammar in GBNF or Lark; it is empty for JSON_OBJECT. That of TOOL_CALLS is Lark which this
    server wrote (`pipelines/chat/lark.py`). `preamble` is such Lark too, with a rule `start` for what comes before the
    constrained output, which it calls `@answer`; it needs a runtime that has TOOL_CALLS. `whitespace` is of JSON alone:
    a regular expression of what may stand between any two of its tokens, "" for nothing. None is the runtime's way."""

    kind: GrammarKind
    text: str = ""
    preamble: str = ""
    whitespace: str | None = None


class ThinkingBudget(msgspec.Struct, frozen=True, gc=False):
    """The most tokens of the reasoning: those after `start`, in prompt or output. Where they are spent, `end` follows,
    which closes it."""

    num_tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Parameters of how tokens are chosen. `sluice.engine.validation.check_sampling` checks their ranges.

    temperature 0 is greedy; top_k 0, top_p 1, typical_p 1 and min_p 0 switch those filters off. The repetition
    penalty counts prompt and output (as transformers does), presence and frequency penalty count the output only (as
    OpenAI does). `logprobs` and `prompt_logprobs` request the log probability of each token and of that many most
    likely tokens; they are the model's, before penalties, temperature and filters. `bad_words` are token sequences
    that must not occur in the output, and with any `allowed_token_ids` it has no other tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    thinking_token_budget: ThinkingBudget | None = None
    beam_width: int = 1
    """Beams of a beam search, whose best one is the answer; it comes in one event. This field and those below are not
    supported by every runtime (`EngineInfo.sampling_fields`). None is the runtime's own default."""
    length_penalty: float | None = None
    early_stopping: int | None = None
    beam_search_diversity_rate: float | None = None
    no_repeat_ngram_size: int | None = None
    top_p_min: float | None = None
    top_p_decay: float | None = None
    top_p_reset_ids: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A request to continue one prompt. `request_id` is for logs and need not be unique. `resume_token_ids` is output
    that a lost engine has generated and sent: generation continues after it, and it counts towards `max_tokens`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Lower values run earlier."""
    tenant: str = ""
    """The tenant that served tokens are charged to: tenants of one priority share the engine by their weights."""
    weight: float | None = None
    """The tenant's weight from this request on; None leaves the one it has."""
    cache_salt: str = ""
    """KV blocks are shared only between requests with the same salt."""
    session: str = ""
    """A name that requests share which follow each other, so that one replica gets them; "" for none."""
    timeout_s: float | None = None
    """Limit from submit to the last token; a request that takes longer ends in a DEADLINE error."""
    queue_timeout_s: float | None = None
    """Limit from submit to admission; a request that waits longer ends in a DEADLINE error."""
    resume_token_ids: list[int] = []
    adapter: str = ""
    """Name of the LoRA adapter to use; one of `EngineInfo.adapters`."""
    predicted_token_ids: list[int] = []
    """A text that the output is likely to repeat. Prompt lookup drafts from it too; it changes no output."""
    returns_metrics: bool = False
    """Whether events carry the sequence's `SequenceMetrics`."""
    returns_timing: bool = False
    """Whether events carry the sequence's `SequenceTiming`."""
    returns_context_logits: bool = False
    returns_generation_logits: bool = False
    """Whether events carry the logits of the prompt's tokens and of the generated ones (`EngineInfo.gives_logits`)."""
    second_text_start: int = 0
    """Where the second text of a pair begins in the prompt, for an engine that scores; 0 for none."""
    images: list[bytes] = []
    """Image files, in the order of their placeholders in the prompt (`EngineInfo.image_placeholders`). The runtime puts
    the tokens of an image in the place of its placeholder; all of them count as the prompt's."""
    fits_context: bool = False
    """Whether `max_tokens` is cut to what the context leaves once the images are in the prompt."""
    hands_over: bool = False
    """Whether another engine goes on after the first token, with `EventDetail.handover`
    (`EngineInfo.handover_fields`)."""

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether nothing of its prompt may come from a runtime's cache: only tokens that are computed have the log
        probabilities that it asks for."""
        return self.sampling.prompt_logprobs is not None and not self.resume_token_ids


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log probability of one token, and the most likely tokens as (token id, log probability), best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class SequenceMetrics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence's wait for its admission, and its draft tokens so far: those proposed and those accepted.
    `predicted_queue_s` is the wait that its engine predicted when it came; 0 for an engine that predicts none."""

    queue_s: float
    num_drafted: int = 0
    num_accepted: int = 0
    predicted_queue_s: float = 0.0


class SequenceTiming(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a sequence's time went, in seconds since the engine got it. `age_s` is now, and `queue_s` the end of the
    wait for its admission. `chunks` are those of its prompt that were computed, (start, end, tokens), and `pauses` the
    times between a preemption and the admission after it, (start, end); both only those since the last timing."""

    age_s: float
    queue_s: float
    chunks: list[tuple[float, float, int]] = []
    pauses: list[tuple[float, float]] = []


class Eviction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a block left the prefix cache, in seconds before now, and the tenant and session for whose tokens."""

    age_s: float
    tenant: str = ""
    session: str = ""


class EventDetail(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields that few events carry: `prompt_logprobs` the first of a request, one for each prompt token, of which the
    first is None; `num_cached_tokens` one event; `logprobs` one for each token of the event. Logits are the model's
    own, [tokens, vocab_size] float32 as bytes: `context_logits` of the whole prompt with the first event,
    `generation_logits` of the event's tokens. `metrics` come with every event that was to have them.
    `num_prompt_tokens`, those of images among them, come with the first event of a request with images. `timing` comes,
    where the request asks for it, with the first event of an engine and the first one after a pause. `handover` comes
    with the last event of a request that is handed over; without it the other engine begins anew. `evicted` comes with
    `num_cached_tokens` for a request of a session, where the block that follows those was evicted a while ago."""

    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    metrics: SequenceMetrics | None = None
    context_logits: bytes | None = None
    generation_logits: bytes | None = None
    num_prompt_tokens: int | None = None
    timing: SequenceTiming | None = None
    handover: bytes | None = None
    evicted: Eviction | None = None


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The new tokens of one request after a step. `stream_id` is the number that the client submitted it under. A token
    that ended the sequence (end of sequence, stop token) is the last of `token_ids`, with finish reason `stop`."""

    stream_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    detail: EventDetail | None = None


class RequestFailed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The error in which a request ends: rejected at submit, or failed while running. `message` is its `template`."""

    stream_id: int
    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    predicted_wait_s: float | None = None
    """The predicted wait, where the request was refused because it is longer than `Submit.most_wait_s`."""

    def to_error(self) -> SluiceError:
        """Return the error that the client gets."""
        error = SluiceError(self.code, self.message, param=self.param, retry_after_s=self.retry_after_s)
        error.predicted_wait_s = self.predicted_wait_s
        return error


BACKGROUND_PRIORITY = 1 << 20
"""Requests of this priority and later ones are work that nobody waits for. Whoever sends them gives way to the rest."""


class BlockSource(msgspec.Struct, frozen=True, array_like=True):
    """Where an engine takes blocks from that another one has computed: the first `num_blocks` of a prompt."""

    endpoint: str
    num_blocks: int = 0
    server_key: str = ""
    """The other engine's public key of CURVE; "" for one that takes connections without keys."""
    handover: bytes = b""
    """Bytes that the other engine's runtime handed over (`EventDetail.handover`). Good for one engine, once."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties and limits of a loaded engine; sent once, when it is ready for requests."""

    runtime: str
    model_type: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    """0 for an encoder, which keeps nothing. Of several replicas it is the least, which any request must fit."""
    max_num_seqs: int
    max_num_batched_tokens: int
    load_seconds: float
    kv_cache_dtype: str = ""
    quantization: str = "none"
    scheduler_policy: str = "guaranteed_no_evict"
    runtime_version: str = ""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that requests may use."""
    adapter_digests: dict[str, str] = {}
    """Digests of their files, with which the hashes of their blocks begin; not of vLLM's."""
    max_beam_width: int = 1
    sampling_fields: tuple[str, ...] = ()
    """The optional sampling parameters that this runtime supports."""
    refused_sampling: dict[str, str] = {}
    """Why it refuses other sampling parameters, by name: its sampler would not act on them. A `seed` that it refuses is
    not drawn either."""
    grammar_kinds: tuple[GrammarKind, ...] = tuple(GrammarKind)
    """Languages of constraints that this runtime supports."""
    gives_logits: bool = False
    """Whether the runtime can return logits."""
    num_gpus: int = 0
    image_placeholders: tuple[str, ...] = ()
    """The texts that stand for the first, second, ... image of a prompt: as many as a prompt may have images."""
    embedding_size: int = 0
    """Elements of a hidden state, for an engine that embeds: it has those for logits, and its tokens mean nothing. 0
    for an engine that generates."""
    is_pooled: bool = False
    """Whether an engine that embeds has one vector for the logits of its token, which it has pooled by itself."""
    gives_scores: bool = False
    """Whether it has a score for the logits of its token; `embedding_size` is 1."""
    can_sleep: bool = False
    """Whether it takes commands to sleep and to wake up."""
    is_prefill: bool = False
    """Whether the engine is there to compute prompts for others (`EngineRole.PREFILL`)."""
    block_identity: str = ""
    """The same in engines that compute the same bits for a block, which they can take from each other; "" for one that
    takes and gives none."""
    gives_views: bool = False
    """Whether it answers `AskView`."""
    total_blocks: int = 0
    """KV blocks of several replicas together; 0 for one engine."""
    max_cached_tokens: int = 0
    """Most tokens of a sequence that the KV cache keeps, where attention has a window; 0 for all of them."""
    handover_fields: tuple[str, ...] = ()
    """For a runtime that moves blocks itself, whose prefill engines compute the first token too and hand the request
    over (`BlockSource.handover`): the sampling parameters with which another engine can go on."""

    @property
    def capacity_blocks(self) -> int:
        """KV blocks of all replicas together, or of the one engine."""
        return self.total_blocks or self.num_blocks
