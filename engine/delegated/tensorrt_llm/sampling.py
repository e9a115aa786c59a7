"""From our sampling parameters to TensorRT-LLM's, field by field."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.grammars import guide
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, field_names, float_tensor
from sluice.engine.delegated.tensorrt_llm.samplers import ModelSampler, SamplerKind
from sluice.engine.types import GenerateRequest, SamplingParams, ThinkingBudget
from sluice.errors import ErrorCode, SluiceError, invalid

NO_END = -1
"""The end_id that no token has."""
_SEED_BITS = 63
_WHOLE_P = 1.0 - 1e-6
_UNSET = SamplingParams()
_BUDGET, _BUDGET_CLASS = "thinking_token_budget", "ThinkingBudgetLogitsProcessor"


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """A request, and what decides how it is put to TensorRT-LLM."""

    request: GenerateRequest
    folder: LlmFolder
    backend: str | None
    """The guided decoding backend."""
    known: frozenset[str]
    """Fields that the installed SamplingParams has."""
    sampler: ModelSampler

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def num_resumed(self) -> int:
        """Output tokens that count as prompt now."""
        return len(self.request.resume_token_ids)


Value = Callable[[SamplingContext], Any]
"""Returns a field's value; None leaves the field at its default."""


@dataclass(frozen=True, slots=True)
class TensorRtLlmField:
    """One field of TensorRT-LLM's SamplingParams: what it is made of, or why it is left alone."""

    name: str
    ours: str
    """Our field, "" for none."""
    note: str = ""
    value: Value | None = None
    """None: the field is never given."""
    default: Any = None
    """The library's default; a test compares."""
    is_optional: bool = False
    """Whether a version may lack it."""


def sampling_params(
    library: TensorRtLlmLibrary,
    request: GenerateRequest,
    folder: LlmFolder,
    backend: str | None,
    sampler: ModelSampler,
) -> Any:
    """Return `tensorrt_llm.SamplingParams` for a request; what was generated before (`resume_token_ids`) counts. Raises
    INVALID, naming the field, for what TensorRT-LLM cannot do."""
    cls = library.llmapi.SamplingParams
    context = SamplingContext(request, folder, backend, field_names(cls), sampler)
    _check(context, library)
    given = _given(context, library)
    if "guided_decoding" in given:
        given["guided_decoding"] = library.llmapi.GuidedDecodingParams(**given["guided_decoding"])
    if "logits_processor" in given:
        given["logits_processor"] = _budget_processor(given["logits_processor"], library)
    try:
        return cls(**given)
    except ValueError as error:
        raise invalid("sampling", f"TensorRT-LLM {library.version} refuses the sampling parameters: {error}") from error


def _given(context: SamplingContext, library: TensorRtLlmLibrary) -> dict[str, Any]:
    """Return values by field, where they are not the default."""
    given = {}
    for field in FIELDS:
        value = None if field.value is None else field.value(context)
        if value is None:
            continue
        if field.name in context.known:
            given[field.name] = value
        elif not field.is_optional:
            message = f"TensorRT-LLM {library.version} has no {field.name}, which {field.ours or 'every request'} needs"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=field.ours or None)
    return given


def _check(context: SamplingContext, library: TensorRtLlmLibrary) -> None:
    params = context.params
    if params.typical_p != 1.0:
        message = f"typical_p must be 1, since TensorRT-LLM has no such filter, got {params.typical_p}"
        raise invalid("typical_p", message)
    long = next((word for word in params.bad_words if len(word) > 1), None)
    if long is not None and (context.sampler.bans_by_bias or not library.takes_sequences("bad_token_ids")):
        raise invalid(
            "bad_words",
            f"bad_words must be of one token each, also after a space: TensorRT-LLM {library.version} takes single "
            f"tokens alone, later ones several. One of them has the tokens {', '.join(map(str, long))}; leave it out, "
            "or ban one of these by a logit_bias of -100",
        )
    context.sampler.check(params)


# -- a budget for the reasoning: TensorRT-LLM's own processor of logits closes the reasoning where it is spent


def budget_refusal(arguments: Mapping[str, Any], library: TensorRtLlmLibrary) -> dict[str, str]:
    """Return why requests with a budget are refused, by the field; nothing where they are not. Processors of logits do
    not run beside speculation."""
    if library.find(_BUDGET_CLASS) is None:
        reason = f"TensorRT-LLM {library.version} has none, later versions of 1.3 do"
    elif arguments.get("speculative_config") is not None:
        reason = "TensorRT-LLM keeps to none beside speculation"
    else:
        return {}
    return {_BUDGET: f"{_BUDGET} must be left out: {reason}"}


def _budget_processor(budget: ThinkingBudget, library: TensorRtLlmLibrary) -> Any:
    """Return what keeps to the budget. It looks for the marks in prompt and output, as our own executor does."""
    processor = library.find(_BUDGET_CLASS)
    assert processor is not None, "refused before"
    return processor(budget.num_tokens, list(budget.start), list(budget.end))


# -- values of fields


def _ours(name: str) -> Value:
    """Return our field's value, where it is not the one that means off: TensorRT-LLM is then spared the work."""
    off = getattr(_UNSET, name)
    return lambda context: None if getattr(context.params, name) == off else getattr(context.params, name)


def _unless_greedy(value: Callable[[SamplingParams], Any]) -> Value:
    return lambda context: None if context.is_greedy or context.params.beam_width > 1 else value(context.params)


def _top_p(params: SamplingParams) -> float:
    """Return 1 for what float32 can hardly tell from it: kernels of some versions end the engine at such a share (issue
    19485)."""
    return 1.0 if params.top_p > _WHOLE_P else params.top_p


def _always(value: bool) -> Value:
    return lambda context: value


def _min_tokens(context: SamplingContext) -> int | None:
    """Return what is left of them. Without an end there is nothing to ban, and TensorRT-LLM would ban the vocabulary's
    last token for -1."""
    left = context.params.min_tokens - context.num_resumed
    return left if left > 0 and _end_id(context) != NO_END else None


def _top_k(context: SamplingContext) -> int | None:
    if context.params.beam_width > 1:
        return None
    return 1 if context.is_greedy else context.params.top_k


def _seed(context: SamplingContext) -> int | None:
    """The runtime's own default is 0 for every request, so that equal prompts would get equal answers."""
    if context.is_greedy or "seed" in context.sampler.refusals:
        return None
    return context.params.seed if context.params.seed is not None else secrets.randbits(_SEED_BITS)


def _end_id(context: SamplingContext) -> int:
    ends = context.folder.eos_token_ids
    return ends[0] if ends and not context.params.ignore_eos else NO_END


def _stop_token_ids(context: SamplingContext) -> list[int] | None:
    """Return the model's ends after the first, and the request's own."""
    ends = () if context.params.ignore_eos else context.folder.eos_token_ids[1:]
    ids = dict.fromkeys((*ends, *context.params.stop_token_ids))
    ids.pop(_end_id(context), None)
    return list(ids) or None


def _bad_token_ids(context: SamplingContext) -> list[int | list[int]] | None:
    words = () if context.sampler.bans_by_bias else context.params.bad_words
    return [word[0] if len(word) == 1 else list(word) for word in words] or None


def _embedding_bias(context: SamplingContext) -> Any:
    """Return what is added to the logits, [vocab_size] float32: allowed tokens are those that nothing else is banned
    for. A sampler that has no bad words gets them here."""
    biases, allowed = dict(context.params.logit_bias), context.params.allowed_token_ids
    if context.sampler.bans_by_bias:
        biases |= {word[0]: -math.inf for word in context.params.bad_words}
    if not biases and not allowed:
        return None
    values = np.full(context.folder.vocab_size, -math.inf if allowed else 0, np.float32)
    values[list(allowed)] = 0
    values[list(biases)] += np.array([*biases.values()], np.float32)
    return float_tensor(values)


def _prompt_ignore_length(context: SamplingContext) -> int | None:
    """Presence and frequency count output only; tokens of a resumed output stand in the prompt and count."""
    params = context.params
    has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0
    return len(context.request.prompt_token_ids) if has_penalty else None


def _prompt_logprobs(context: SamplingContext) -> int | None:
    return None if context.request.resume_token_ids else _logprob_count(context, context.params.prompt_logprobs)


def _logprob_count(context: SamplingContext, count: int | None) -> int | None:
    """Versions without logprobs_mode, and TRTLLMSampler, return nothing for 0 in place of the own one: they get 1."""
    has_own = "logprobs_mode" in context.known and context.sampler.kind is not SamplerKind.TRTLLM
    return count if count is None or has_own else max(count, 1)


def _guided_decoding(context: SamplingContext) -> dict[str, Any] | None:
    grammar = context.params.grammar
    return None if grammar is None else guide(grammar, context.backend)


_IDS_ONLY = "ids come in and go out; text is made of them outside of the engine"
_NOT_OFFERED = "no API of ours has it"
_NO_LOGITS = "only OpenVINO gives logits"

# fmt: off
FIELDS = (
    TensorRtLlmField("max_tokens", "max_tokens", "less what was generated before a resume",
                  lambda context: context.params.max_tokens - context.num_resumed, default=32),
    TensorRtLlmField("min_tokens", "min_tokens",
                  "less what was generated before a resume; with several ends two requests", _min_tokens),
    TensorRtLlmField("n", "", "1: each of several answers is a request of its own", default=1),
    TensorRtLlmField("best_of", "beam_width", "for a beam search", _ours("beam_width")),
    TensorRtLlmField("use_beam_search", "beam_width", "above 1",
                  lambda context: True if context.params.beam_width > 1 else None, default=False),
    TensorRtLlmField("beam_width_array", "", _NOT_OFFERED),
    TensorRtLlmField("end_id", "", "the model's first end of sequence; -1 with ignore_eos", _end_id),
    TensorRtLlmField("pad_id", "", "the model's first end of sequence, else 0",
                  lambda context: next(iter(context.folder.eos_token_ids), 0)),
    TensorRtLlmField("seed", "seed", "drawn where none is given", _seed),
    TensorRtLlmField("temperature", "temperature", "0 is top_k 1 without a temperature",
                  lambda context: context.params.temperature or None),
    TensorRtLlmField("top_k", "top_k", "1 where temperature is 0; 0 is all", _top_k),
    TensorRtLlmField("top_p", "top_p", "not with temperature 0", _unless_greedy(_top_p)),
    TensorRtLlmField("top_p_min", "top_p_min", "", _ours("top_p_min")),
    TensorRtLlmField("top_p_reset_ids", "top_p_reset_ids", "", _ours("top_p_reset_ids")),
    TensorRtLlmField("top_p_decay", "top_p_decay", "", _ours("top_p_decay")),
    TensorRtLlmField("min_p", "min_p", "not with temperature 0", _unless_greedy(lambda params: params.min_p or None)),
    TensorRtLlmField("repetition_penalty", "repetition_penalty", "counts prompt and output",
                  _ours("repetition_penalty")),
    TensorRtLlmField("presence_penalty", "presence_penalty", "", _ours("presence_penalty")),
    TensorRtLlmField("frequency_penalty", "frequency_penalty", "", _ours("frequency_penalty")),
    TensorRtLlmField("prompt_ignore_length", "presence_penalty, frequency_penalty",
                  "the prompt's length, so that they count output only; a version without it counts the prompt too",
                  _prompt_ignore_length, is_optional=True),
    TensorRtLlmField("length_penalty", "length_penalty", "of a beam search", _ours("length_penalty")),
    TensorRtLlmField("beam_search_diversity_rate", "beam_search_diversity_rate", "of a beam search",
                  _ours("beam_search_diversity_rate")),
    TensorRtLlmField("early_stopping", "early_stopping", "of a beam search", _ours("early_stopping")),
    TensorRtLlmField("no_repeat_ngram_size", "no_repeat_ngram_size", "", _ours("no_repeat_ngram_size")),
    TensorRtLlmField("stop", "", "stop strings are found in our own text, and the request is cancelled"),
    TensorRtLlmField("stop_token_ids", "stop_token_ids", "and the model's further ends of sequence", _stop_token_ids),
    TensorRtLlmField("include_stop_str_in_output", "", "true: a token that ends an output is part of it",
                  _always(True), default=False),
    TensorRtLlmField("bad", "", "words are token ids here"),
    TensorRtLlmField("bad_token_ids", "bad_words", "of several tokens where the version takes such", _bad_token_ids),
    TensorRtLlmField("logits_processor", "thinking_token_budget", "which closes the reasoning in time",
                  _ours("thinking_token_budget")),
    TensorRtLlmField("apply_batched_logits_processor", "", _NOT_OFFERED, default=False),
    TensorRtLlmField("embedding_bias", "logit_bias, allowed_token_ids",
                  "and bad_words where the sampler has none", _embedding_bias),
    TensorRtLlmField("guided_decoding", "grammar", "in the words of guided_decoding_backend", _guided_decoding),
    TensorRtLlmField("lookahead_config", "", "the model's own is used"),
    TensorRtLlmField("ignore_eos", "ignore_eos",
                  "said by end_id -1: newer versions would drop stop_token_ids with it", default=False),
    TensorRtLlmField("detokenize", "", f"false: {_IDS_ONLY}", _always(False), default=True),
    TensorRtLlmField("add_special_tokens", "", _IDS_ONLY, default=True),
    TensorRtLlmField("truncate_prompt_tokens", "", "a prompt that is too long is refused"),
    TensorRtLlmField("skip_special_tokens", "", _IDS_ONLY, default=True),
    TensorRtLlmField("spaces_between_special_tokens", "", _IDS_ONLY, default=True),
    TensorRtLlmField("logprobs", "logprobs", "at least 1 before 1.3 and with TRTLLMSampler",
                  lambda context: _logprob_count(context, context.params.logprobs)),
    TensorRtLlmField("prompt_logprobs", "prompt_logprobs", "as logprobs; not after a resume",
                  _prompt_logprobs),
    TensorRtLlmField("logprobs_mode", "", "its default, RAW: before penalties, temperature and filters", default="RAW"),
    TensorRtLlmField("return_context_logits", "", _NO_LOGITS, default=False),
    TensorRtLlmField("return_generation_logits", "", _NO_LOGITS, default=False),
    TensorRtLlmField("exclude_input_from_output", "", "true", _always(True), default=True),
    TensorRtLlmField("return_encoder_output", "", _NOT_OFFERED, default=False),
    TensorRtLlmField("return_perf_metrics", "", "true: cached tokens are read from them", _always(True), default=False),
    TensorRtLlmField("additional_model_outputs", "", _NOT_OFFERED),
)
"""Every field of TensorRT-LLM's SamplingParams."""
# fmt: on
