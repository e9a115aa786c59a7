"""Checks of requests. The client runs them before it sends a request, and the engine before it queues one."""

import math
from collections.abc import Collection

from engine.blocks import blocks_for, worst_case_blocks
from engine.types import EngineInfo, GenerateRequest, SamplingParams
from sluice.errors import SluiceError, invalid

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_LABEL = 256
"""Most characters of a tenant's name and of a cache salt, which both stay in memory after the request."""
_PRIORITIES = (-(2**31), 2**31 - 1)

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_FRACTIONS = ("top_p", "typical_p")
RUNTIME_FIELDS = (
    "beam_width",
    "length_penalty",
    "early_stopping",
    "beam_search_diversity_rate",
    "no_repeat_ngram_size",
    "top_p_min",
    "top_p_decay",
    "top_p_reset_ids",
)
"""Sampling parameters that only some runtimes support (`EngineInfo.sampling_fields`)."""
_DEFAULTS = {name: getattr(SamplingParams(), name) for name in RUNTIME_FIELDS}
_MAX_INT32 = 2**31 - 1
_RUNTIME_RANGES: dict[str, tuple[float, float]] = {
    "early_stopping": (0, _MAX_INT32),
    "no_repeat_ngram_size": (1, _MAX_INT32),
    "top_p_min": (0.0, 1.0),
    "top_p_reset_ids": (0, _MAX_INT32),
}
"""Ranges that TensorRT-LLM's executor enforces, which would fail with an error of its own."""
_MAX_BIAS = 100.0


def check_sampling(params: SamplingParams) -> None:
    """Check all sampling parameters. Raises INVALID for the first field out of range, with its value and the range."""
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high:
            raise _out_of_range(name, value, f"between {low:g} and {high:g}")
    for name in _FRACTIONS:
        if not 0.0 < getattr(params, name) <= 1.0:
            raise _out_of_range(name, getattr(params, name), "greater than 0 and at most 1")
    if not 0.0 < params.repetition_penalty < math.inf:
        raise _out_of_range("repetition_penalty", params.repetition_penalty, "greater than 0")
    if not 0 <= params.top_k <= _MAX_INT32:
        raise _out_of_range("top_k", params.top_k, f"between 0 (off) and {_MAX_INT32}")
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise _out_of_range("seed", params.seed, f"between 0 and {MAX_SEED}")
    _check_counts(params)
    _check_runtime_fields(params)
    _check_token_rules(params)


def _check_runtime_fields(params: SamplingParams) -> None:
    for name, (low, high) in _RUNTIME_RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise _out_of_range(name, value, f"between {low:g} and {high:.10g}")
    for name in ("length_penalty", "beam_search_diversity_rate"):
        value = getattr(params, name)
        if value is not None and not 0.0 <= value < math.inf:
            raise _out_of_range(name, value, "0 or more")
    if params.top_p_decay is not None and not 0.0 < params.top_p_decay <= 1.0:
        raise _out_of_range("top_p_decay", params.top_p_decay, "greater than 0 and at most 1")


def _check_counts(params: SamplingParams) -> None:
    if params.max_tokens < 1:
        raise _out_of_range("max_tokens", params.max_tokens, "1 or more")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise _out_of_range("min_tokens", params.min_tokens, f"between 0 and max_tokens ({params.max_tokens})")
    wrong = next((each for each in params.stop_token_ids if not 0 <= each <= _MAX_INT32), None)
    if wrong is not None:
        raise _out_of_range("stop_token_ids", wrong, f"between 0 and {_MAX_INT32}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise _out_of_range(name, value, f"between 0 and {MAX_LOGPROBS}")


def _check_token_rules(params: SamplingParams) -> None:
    """Check the parameters about single tokens. `check_request`, which knows the vocabulary, checks the token ids."""
    for token_id, bias in params.logit_bias.items():
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            allowed = f"between {-_MAX_BIAS:g} and {_MAX_BIAS:g}"
            raise invalid("logit_bias", f"logit_bias of token {token_id} must be {allowed}, got {bias}")
    if not all(params.bad_words):
        raise invalid("bad_words", "bad_words must be sequences of at least 1 token, got an empty one")
    if params.grammar is not None and params.ignore_eos:
        raise invalid(
            "ignore_eos",
            "ignore_eos must be false where the output has to match a grammar, got true; "
            "such an output ends with the end of sequence",
        )


def _out_of_range(name: str, value: float, allowed: str) -> SluiceError:
    return invalid(name, f"{name} must be {allowed}, got {value}")


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Check a request against the limits of an engine. Raises INVALID if the engine could never finish it."""
    check_sampling(request.sampling)
    _check_runtime_support(request, info)
    _check_envelope(request)
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise invalid("prompt", "prompt must have at least 1 token, got 0")
    if num_prompt >= info.max_model_len:
        raise invalid(
            "prompt",
            f"the prompt has {num_prompt} tokens, but this model's context is {info.max_model_len} tokens "
            f"and must leave room for at least 1 of output; shorten the prompt",
        )
    if num_prompt + max_tokens > info.max_model_len:
        raise invalid(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together {num_prompt + max_tokens}; "
            f"this model's context is {info.max_model_len} tokens, so max_tokens may be at most "
            f"{info.max_model_len - num_prompt}",
        )
    _check_fits_cache(num_prompt, max_tokens, info)
    _check_token_ids(request, info.vocab_size)


def _check_runtime_support(request: GenerateRequest, info: EngineInfo) -> None:
    """Check what only some runtimes support: sampling fields, beams, grammars and adapters."""
    params = request.sampling
    for name in RUNTIME_FIELDS:
        if getattr(params, name) != _DEFAULTS[name] and name not in info.sampling_fields:
            raise invalid(name, f"{name} needs the TensorRT-LLM runtime; this model is served by {info.runtime}")
    if not 1 <= params.beam_width <= info.max_beam_width:
        allowed = f"between 1 and {info.max_beam_width} (max_beam_width)"
        raise _out_of_range("beam_width", params.beam_width, allowed)
    if params.grammar is not None and params.grammar.kind not in info.grammar_kinds:
        kinds = ", ".join(info.grammar_kinds) or "none"
        raise invalid(
            "grammar",
            f"this model's runtime keeps to no grammar of the kind {params.grammar.kind.value}; it has: {kinds}",
        )
    if request.adapter and request.adapter not in info.adapters:
        known = ", ".join(info.adapters) or "none"
        raise invalid("adapter", f"there is no adapter {request.adapter!r}; this model has: {known}")


def _check_fits_cache(num_prompt: int, max_tokens: int, info: EngineInfo) -> None:
    cache = f"the whole KV cache has {info.num_blocks} blocks of {info.block_size} tokens"
    if blocks_for(num_prompt, info.block_size) > info.num_blocks:
        raise invalid("prompt", f"the prompt has {num_prompt} tokens, but {cache}; shorten the prompt")
    needed = worst_case_blocks(num_prompt, max_tokens, info.block_size)
    if needed > info.num_blocks:
        raise invalid(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, which needs up to {needed} blocks, "
            f"but {cache}; lower max_tokens",
        )


def _check_envelope(request: GenerateRequest) -> None:
    """Check timeouts, priority, labels and resumed output."""
    for name in ("timeout_s", "queue_timeout_s"):
        value = getattr(request, name)
        if value is not None and not 0.0 < value < math.inf:
            raise _out_of_range(name, value, "greater than 0 seconds")
    low, high = _PRIORITIES
    if not low <= request.priority <= high:
        raise _out_of_range("priority", request.priority, f"between {low} and {high}")
    for name in ("tenant", "cache_salt"):
        length = len(getattr(request, name))
        if length > MAX_LABEL:
            raise invalid(name, f"{name} must have at most {MAX_LABEL} characters, got {length}")
    num_resumed, max_tokens = len(request.resume_token_ids), request.sampling.max_tokens
    if num_resumed >= max_tokens:
        raise invalid(
            "resume_token_ids",
            f"resume_token_ids must be fewer than max_tokens ({max_tokens}), which counts them too, got {num_resumed}",
        )


def _check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    params = request.sampling
    _check_in_vocabulary("prompt", "token ids of the prompt", request.prompt_token_ids, vocab_size)
    _check_in_vocabulary("resume_token_ids", "resume_token_ids", request.resume_token_ids, vocab_size)
    if params.top_p_reset_ids is not None:
        _check_in_vocabulary("top_p_reset_ids", "top_p_reset_ids", [params.top_p_reset_ids], vocab_size)
    _check_in_vocabulary("logit_bias", "token ids of logit_bias", params.logit_bias, vocab_size)
    for word in params.bad_words:
        _check_in_vocabulary("bad_words", "token ids of bad_words", word, vocab_size)


def _check_in_vocabulary(param: str, name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise invalid(param, f"{name} must be between 0 and {vocab_size - 1}, got {wrong}")
