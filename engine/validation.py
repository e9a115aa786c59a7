"""What a request may ask for. The client checks before it sends, the engine before it queues: one rule, one place."""

import math

from engine.blocks import blocks_for, worst_case_blocks
from engine.errors import SluiceError, invalid
from engine.types import EngineInfo, GenerateRequest, SamplingParams

MAX_SEED = 2**64 - 1

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def check_sampling(params: SamplingParams) -> None:
    """Raise INVALID, naming the field, what came and what is allowed, for the first field out of range."""
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high:
            raise _out_of_range(name, value, f"between {low:g} and {high:g}")
    if not 0.0 < params.top_p <= 1.0:
        raise _out_of_range("top_p", params.top_p, "greater than 0 and at most 1")
    if not 0.0 < params.repetition_penalty < math.inf:
        raise _out_of_range("repetition_penalty", params.repetition_penalty, "greater than 0")
    if params.top_k < 0:
        raise _out_of_range("top_k", params.top_k, "0 (off) or more")
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise _out_of_range("seed", params.seed, f"between 0 and {MAX_SEED}")
    _check_counts(params)


def _check_counts(params: SamplingParams) -> None:
    if params.max_tokens < 1:
        raise _out_of_range("max_tokens", params.max_tokens, "1 or more")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise _out_of_range("min_tokens", params.min_tokens, f"between 0 and max_tokens ({params.max_tokens})")
    if params.stop_token_ids and min(params.stop_token_ids) < 0:
        raise _out_of_range("stop_token_ids", min(params.stop_token_ids), "0 or more")


def _out_of_range(name: str, value: float, allowed: str) -> SluiceError:
    return invalid(name, f"{name} must be {allowed}, got {value}")


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise INVALID for a request that the engine could never finish, with the numbers that say why."""
    check_sampling(request.sampling)
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


def _check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    ids = request.prompt_token_ids
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise invalid("prompt", f"token ids of the prompt must be between 0 and {vocab_size - 1}, got {wrong}")
