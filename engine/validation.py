"""Checks of requests. The client runs them before it sends a request, and the engine before it queues one."""

import math
from collections.abc import Collection

from sluice.engine.blocks import blocks_for, worst_case_blocks
from sluice.engine.sampling_fields import OPTIONAL_FIELDS, SAMPLING_FIELDS
from sluice.engine.types import EngineInfo, GenerateRequest, SamplingParams, ThinkingBudget
from sluice.errors import SluiceError, invalid, named, too_long

MAX_LABEL = 256
"""Most characters of a tenant's name and of a cache salt, which both stay in memory after the request."""
MAX_GRAMMAR_CHARS = 1 << 20
"""More than a runtime's own limits; the text goes to the engine with the request."""
MAX_LOGITS_BYTES = 2**28
"""Most bytes of logits for a request. A step's events travel in one message, which others wait for."""
_BYTES_OF_LOGIT = 4
_UNSET = SamplingParams()
_MAX_TOKENS = named("max_tokens")
_PRIORITIES = (-(2**31), 2**31 - 1)


def check_sampling(params: SamplingParams) -> None:
    """Check all sampling parameters. Raises INVALID for the first field out of range, with its value and the range."""
    for name, field in SAMPLING_FIELDS.items():
        field.check(getattr(params, name))
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise _out_of_range("min_tokens", params.min_tokens, f"between 0 and {_MAX_TOKENS} ({params.max_tokens})")
    if not all(params.bad_words):
        raise invalid("bad_words", "bad_words must be sequences of at least 1 token, got an empty one")
    if params.grammar is not None and len(params.grammar.text) + len(params.grammar.preamble) > MAX_GRAMMAR_CHARS:
        got = len(params.grammar.text)
        raise invalid("grammar", f"the grammar must have at most {MAX_GRAMMAR_CHARS} characters, got {got}")
    budget = params.thinking_token_budget
    if budget is not None and not (budget.num_tokens >= 0 and budget.start and budget.end):
        message = "thinking_token_budget must be 0 or more tokens, and have tokens that open and close the reasoning"
        raise invalid("thinking_token_budget", f"{message}, got {budget}")
    if budget is not None:
        _check_closing(params, budget)
    if params.grammar is not None and params.ignore_eos:
        raise invalid(
            "ignore_eos",
            "ignore_eos must be false where the output has to match a grammar, got true; "
            "such an output ends with the end of sequence",
        )


def _check_closing(params: SamplingParams, budget: ThinkingBudget) -> None:
    """Raise INVALID where what closes the reasoning may be banned: no token would be left to choose then, which fails a
    whole batch on a GPU."""
    banned = {word[-1] for word in params.bad_words}
    not_yet = params.stop_token_ids if params.min_tokens else ()
    allowed = params.allowed_token_ids or budget.end
    for field, is_so in (
        ("bad_words", not banned.isdisjoint(budget.end)),
        ("allowed_token_ids", not {*allowed}.issuperset(budget.end)),
        ("stop_token_ids", not {*not_yet}.isdisjoint(budget.end)),
        ("no_repeat_ngram_size", bool(params.no_repeat_ngram_size)),
    ):
        if is_so:
            closing = ", ".join(map(str, budget.end))
            raise invalid(
                field,
                f"{field} must let the tokens {closing} come, by which thinking_token_budget closes the "
                "reasoning; leave out one of both",
            )


def _out_of_range(name: str, value: float, allowed: str) -> SluiceError:
    return invalid(name, f"{name} must be {allowed}, got {value}")


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Check a request against the limits of an engine. Raises INVALID if the engine could never finish it."""
    check_sampling(request.sampling)
    _check_runtime_support(request, info)
    _check_envelope(request)
    check_lengths(request, info)
    _check_logits(request, info)
    _check_token_ids(request, info.vocab_size)


def check_lengths(request: GenerateRequest, info: EngineInfo) -> None:
    """Check the lengths of prompt and output against context and KV cache. Raises INVALID."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise invalid("prompt", "prompt must have at least 1 token, got 0")
    if num_prompt >= info.max_model_len:
        raise too_long(
            "prompt",
            f"the prompt has {num_prompt} tokens, but this model's context is {info.max_model_len} tokens "
            f"and must leave room for at least 1 of output; shorten the prompt",
            (num_prompt, info.max_model_len - 1),
        )
    if num_prompt + max_tokens > info.max_model_len:
        raise too_long(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and {_MAX_TOKENS} is {max_tokens}, together "
            f"{num_prompt + max_tokens}; this model's context is {info.max_model_len} tokens, so {_MAX_TOKENS} may be "
            f"at most {info.max_model_len - num_prompt}",
        )
    _check_fits_cache(num_prompt, max_tokens, info)


def num_tokens_after(prompt_tokens: int, info: EngineInfo) -> int:
    """Return the tokens that context and KV cache leave after the prompt. It is at least 1, so that the engine refuses
    a prompt that fills them as too long."""
    # The last token is never fed back, so it needs no slot.
    cache_tokens = info.num_blocks * info.block_size + 1
    if 0 < info.max_cached_tokens < cache_tokens:
        cache_tokens = info.max_model_len
    return max(1, min(info.max_model_len, cache_tokens) - prompt_tokens)


def _check_runtime_support(request: GenerateRequest, info: EngineInfo) -> None:
    """Check what only some runtimes support: sampling fields, beams, grammars, adapters and images."""
    params = request.sampling
    for name, reason in info.refused_sampling.items():
        if getattr(params, name) != getattr(_UNSET, name) and not (name == "seed" and params.temperature == 0):
            raise invalid(name, reason)
    for name in OPTIONAL_FIELDS:
        if getattr(params, name) != SAMPLING_FIELDS[name].default and name not in info.sampling_fields:
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
    check_adapter(request.adapter, info)
    if request.images:
        _check_images(request, len(info.image_placeholders))


def check_adapter(name: str, info: EngineInfo) -> None:
    """Raise INVALID for a LoRA adapter that the model does not have; "" is the model without any."""
    if name and name not in info.adapters:
        known = ", ".join(info.adapters) or "none"
        raise invalid("adapter", f"there is no adapter {name!r}; this model has: {known}")


def _check_images(request: GenerateRequest, most: int) -> None:
    num_images = len(request.images)
    if num_images > most:
        raise invalid("images", f"a prompt of this model may have at most {most} images, got {num_images}")
    if request.sampling.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs must be left out where the prompt has images")


def _check_fits_cache(num_prompt: int, max_tokens: int, info: EngineInfo) -> None:
    if not info.num_blocks:  # an encoder keeps nothing
        return
    if 0 < info.max_cached_tokens <= info.num_blocks * info.block_size:  # the rest does not stay
        return
    cache = f"the whole KV cache has {info.num_blocks} blocks of {info.block_size} tokens"
    if blocks_for(num_prompt, info.block_size) > info.num_blocks:
        lengths = (num_prompt, info.num_blocks * info.block_size)
        raise too_long("prompt", f"the prompt has {num_prompt} tokens, but {cache}; shorten the prompt", lengths)
    needed = worst_case_blocks(num_prompt, max_tokens, info.block_size)
    if needed > info.num_blocks:
        raise too_long(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and {_MAX_TOKENS} is {max_tokens}, which needs up to {needed} blocks, "
            f"but {cache}; lower {_MAX_TOKENS}",
        )


def _check_logits(request: GenerateRequest, info: EngineInfo) -> None:
    """Check that the runtime gives the logits that the request asks for, and that they are not too many."""
    wanted = {
        "return_context_logits": len(request.prompt_token_ids) if request.returns_context_logits else 0,
        "return_generation_logits": request.sampling.max_tokens if request.returns_generation_logits else 0,
    }
    for name, num_tokens in wanted.items():
        if num_tokens and not info.gives_logits:
            raise invalid(name, f"{name} must be false: {info.runtime}, which runs this model, returns no logits here")
        most = MAX_LOGITS_BYTES // (_BYTES_OF_LOGIT * (info.embedding_size or info.vocab_size))
        if num_tokens > most:
            what = "prompt" if name == "return_context_logits" else _MAX_TOKENS
            message = f"{name} takes {what} of at most {most} tokens with this vocabulary, got {num_tokens}"
            raise invalid(name, message)


def _check_envelope(request: GenerateRequest) -> None:
    """Check timeouts, weight, priority, labels and resumed output."""
    for name in ("timeout_s", "queue_timeout_s"):
        value = getattr(request, name)
        if value is not None and not 0.0 < value < math.inf:
            raise _out_of_range(name, value, "greater than 0 seconds")
    if request.weight is not None and not 0.0 < request.weight < math.inf:
        raise _out_of_range("weight", request.weight, "a finite number above 0")
    low, high = _PRIORITIES
    if not low <= request.priority <= high:
        raise _out_of_range("priority", request.priority, f"between {low} and {high}")
    for name in ("tenant", "cache_salt", "session"):
        length = len(getattr(request, name))
        if length > MAX_LABEL:
            raise invalid(name, f"{name} must have at most {MAX_LABEL} characters, got {length}")
    num_resumed, max_tokens = len(request.resume_token_ids), request.sampling.max_tokens
    if num_resumed >= max_tokens:
        raise invalid(
            "resume_token_ids",
            f"resume_token_ids must be fewer than {_MAX_TOKENS} ({max_tokens}), which counts them too, "
            f"got {num_resumed}",
        )


def _check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    params = request.sampling
    _check_in_vocabulary("prompt", "token ids of the prompt", request.prompt_token_ids, vocab_size)
    _check_in_vocabulary("resume_token_ids", "resume_token_ids", request.resume_token_ids, vocab_size)
    _check_in_vocabulary("prediction", "token ids of the prediction", request.predicted_token_ids, vocab_size)
    if params.top_p_reset_ids is not None:
        _check_in_vocabulary("top_p_reset_ids", "top_p_reset_ids", [params.top_p_reset_ids], vocab_size)
    _check_in_vocabulary("logit_bias", "token ids of logit_bias", params.logit_bias, vocab_size)
    _check_in_vocabulary("allowed_token_ids", "allowed_token_ids", params.allowed_token_ids, vocab_size)
    for word in params.bad_words:
        _check_in_vocabulary("bad_words", "token ids of bad_words", word, vocab_size)
    if (budget := params.thinking_token_budget) is not None:
        _check_in_vocabulary("thinking_token_budget", "its token ids", (*budget.start, *budget.end), vocab_size)


def _check_in_vocabulary(param: str, name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise invalid(param, f"{name} must be between 0 and {vocab_size - 1}, got {wrong}")
