"""What the fields of TensorRT-LLM's SamplingParams hold for a request: one function a field."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.delegated.tensorrt_llm.folder import ModelFolder
from engine.delegated.tensorrt_llm.library import float_tensor
from engine.delegated.tensorrt_llm.sampling.grammars import guide
from engine.types import GenerateRequest, SamplingParams

NO_END = -1
"""The end_id that no token has."""

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what decides how it is said to TensorRT-LLM."""

    request: GenerateRequest
    folder: ModelFolder
    backend: str | None
    known: frozenset[str]
    """Fields that the installed SamplingParams has."""
    ignored: frozenset[str]

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def num_resumed(self) -> int:
        """Tokens that count as prompt now. Under a grammar none: it is followed again from its beginning."""
        return 0 if self.params.grammar is not None else len(self.request.resume_token_ids)


def unless_greedy(value: Callable[[SamplingParams], Any]) -> Callable[[Asked], Any]:
    return lambda asked: None if asked.is_greedy or asked.params.beam_width > 1 else value(asked.params)


def top_k(asked: Asked) -> int | None:
    if asked.params.beam_width > 1:
        return None
    return 1 if asked.is_greedy else asked.params.top_k


def temperature(asked: Asked) -> float | None:
    return None if asked.is_greedy else asked.params.temperature


def seed(params: SamplingParams) -> int:
    """The runtime's own default is 0 for every request, so that equal prompts would get equal answers."""
    return params.seed if params.seed is not None else secrets.randbits(_SEED_BITS)


def end_id(asked: Asked) -> int:
    ends = asked.folder.eos_token_ids
    return ends[0] if ends and not asked.params.ignore_eos else NO_END


def stop_token_ids(asked: Asked) -> list[int] | None:
    """Ends after the first, and the request's own."""
    ends = () if asked.params.ignore_eos else asked.folder.eos_token_ids[1:]
    ids = [each for each in dict.fromkeys((*ends, *asked.params.stop_token_ids)) if each != end_id(asked)]
    return ids or None


def bad_token_ids(asked: Asked) -> list[int] | None:
    return None if "bad_words" in asked.ignored else [word[0] for word in asked.params.bad_words] or None


def embedding_bias(asked: Asked) -> Any:
    """Added to the logits, [vocab_size] float32. A sampler that knows no bad words gets them here."""
    biases = dict(asked.params.logit_bias)
    if "bad_words" in asked.ignored:
        biases |= {word[0]: -math.inf for word in asked.params.bad_words}
    if not biases:
        return None
    values = np.zeros(asked.folder.vocab_size, np.float32)
    values[list(biases)] = list(biases.values())
    return float_tensor(values)


def prompt_ignore_length(asked: Asked) -> int | None:
    """Presence and frequency count output only; tokens of a resumed output stand in the prompt and count."""
    params = asked.params
    has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0
    return len(asked.request.prompt_token_ids) if has_penalty else None


def logprobs(asked: Asked) -> int | None:
    return _count(asked, asked.params.logprobs)


def prompt_logprobs(asked: Asked) -> int | None:
    return None if asked.request.resume_token_ids else _count(asked, asked.params.prompt_logprobs)


def _count(asked: Asked, count: int | None) -> int | None:
    """Where there is no logprobs_mode yet, 0 brings nothing instead of the token's own: then one more is asked for."""
    return count if count is None or "logprobs_mode" in asked.known else max(count, 1)


def beam_width(asked: Asked) -> int | None:
    return asked.params.beam_width if asked.params.beam_width > 1 else None


def guided_decoding(asked: Asked) -> dict[str, Any] | None:
    grammar = asked.params.grammar
    return None if grammar is None else guide(grammar, asked.backend)


def ours(name: str) -> Callable[[Asked], Any]:
    return lambda asked: getattr(asked.params, name)


def unless(name: str, off: float) -> Callable[[Asked], Any]:
    """Ours, where it is not the value that means off: the runtime is then spared the work."""
    return lambda asked: None if getattr(asked.params, name) == off else getattr(asked.params, name)


def max_tokens(asked: Asked) -> int:
    return asked.params.max_tokens - asked.num_resumed


def min_tokens(asked: Asked) -> int | None:
    left = asked.params.min_tokens - asked.num_resumed
    return left if left > 0 else None


def always(value: bool) -> Callable[[Asked], Any]:
    return lambda asked: value
