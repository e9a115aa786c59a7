"""The choice of the next token: by a hash of the whole context, or by a script."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from .responses import Likeliest
from .samplers import is_since

ADAPTER_SHIFT = 31
"""Added to a token for each unit of the adapter's id: an adapter's answer is its own."""


def echo_next(token_ids: list[int], vocab_size: int) -> int:
    """Return the token that the suite's own runner without a model answers, so that answers can be compared."""
    total = sum((position + 1) * (token_id + 7) for position, token_id in enumerate(token_ids))
    return int((total * 2654435761 + 12345) % 2**32 % vocab_size)


class Script:
    """Token ids by the prompt that they follow: `{"1,2,3": [4, 5]}`, or one list for every prompt.

    A prompt that goes on after a key follows that key's ids from there on: a resumed request gets the rest.
    """

    def __init__(self, path: Path) -> None:
        told: Any = json.loads(path.read_text())
        self._for_all: list[int] | None = told if isinstance(told, list) else None
        texts = {} if isinstance(told, list) else told
        self._by_prompt = {tuple(map(int, key.split(","))): ids for key, ids in texts.items()}

    def next(self, token_ids: list[int], num_generated: int) -> int | None:
        """Return the next token; None where the script has no more."""
        if self._for_all is not None:
            return self._for_all[num_generated] if num_generated < len(self._for_all) else None
        for prompt, ids in self._by_prompt.items():
            position = len(token_ids) - len(prompt)
            if tuple(token_ids[: len(prompt)]) == prompt and 0 <= position < len(ids):
                return int(ids[position])
        return None


class Model:
    """Logits that are 1 for one token and 0 for the others, and what sampling parameters make of them."""

    def __init__(self, vocab_size: int, script: Script | None) -> None:
        self._vocab_size = vocab_size
        self._script = script

    def next(self, token_ids: list[int], num_prompt: int, params: Any, adapter: int, beam: int) -> tuple[int, int]:
        """Return the token that is sampled and the model's own likeliest, both of the context `token_ids`.

        Where the script has ended it is the end token.
        """
        num_generated = len(token_ids) - num_prompt
        likeliest = self._likeliest(token_ids, num_generated, params, adapter, beam)
        if not _has_edits(params, num_generated):
            return likeliest, likeliest
        logits = np.zeros(self._vocab_size, np.float32)
        logits[likeliest] = 1.0
        _edit(logits, token_ids, num_prompt, params)
        return int(np.argmax(logits)), likeliest

    def _likeliest(self, token_ids: list[int], num_generated: int, params: Any, adapter: int, beam: int) -> int:
        if self._script is None:
            shift = adapter * ADAPTER_SHIFT + beam
            return (echo_next(token_ids, self._vocab_size) + shift) % self._vocab_size
        told = self._script.next(token_ids, num_generated)
        if told is None:
            return int(params.end_id) if params.end_id is not None else 0
        return (told + adapter * ADAPTER_SHIFT + beam) % self._vocab_size

    def logprobs(self, likeliest: int, sampled: int, count: int) -> Likeliest:
        """Return those of the `count` likeliest tokens and of the sampled one."""
        rest = -math.log(math.e + self._vocab_size - 1)
        others = [token for token in range(min(count + 1, self._vocab_size)) if token != likeliest]
        ranked = [(likeliest, 1 + rest, 1), *((token, rest, place) for place, token in enumerate(others, 2))][:count]
        if all(token != sampled for token, _, _ in ranked):
            is_top = sampled == likeliest
            ranked.append((sampled, 1 + rest if is_top else rest, 1 if is_top else 2))
        return ranked


def _has_edits(params: Any, num_generated: int) -> bool:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return (
        any(penalty is not None for penalty in penalties)
        or bool(params.bad_token_ids)
        or params.embedding_bias is not None
        or num_generated < (params.min_tokens or 0)
        or params.logits_processor is not None
    )


def _edit(logits: Any, token_ids: list[int], num_prompt: int, params: Any) -> None:
    """Edit logits in the order of our own executor, after a processor of logits. The repetition penalty counts prompt
    and output; the others too, less the first `prompt_ignore_length` tokens of the prompt. Tokens of images have no
    logits."""
    if params.logits_processor is not None:
        params.logits_processor(0, logits[None], [token_ids], None, None)
    if params.embedding_bias is not None:
        logits += np.asarray(params.embedding_bias, np.float32)
    if params.repetition_penalty is not None:
        seen = np.unique([each for each in token_ids if each < logits.size])
        scores = logits[seen]
        logits[seen] = np.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    counted = [
        each for each in token_ids[min(max(params.prompt_ignore_length or 0, 0), num_prompt) :] if each < logits.size
    ]
    if counted:
        seen, counts = np.unique(counted, return_counts=True)
        logits[seen] -= (params.presence_penalty or 0.0) + counts * (params.frequency_penalty or 0.0)
    words = [[each] if isinstance(each, int) else each for each in params.bad_token_ids or ()]
    banned = [word[-1] for word in words if token_ids[len(token_ids) - len(word) + 1 :] == word[:-1]]
    if len(token_ids) - num_prompt < (params.min_tokens or 0) and params.end_id is not None:
        # Other ends than this are not banned, and -1 was the vocabulary's last token (NVIDIA's pull 12358).
        banned += [params.end_id] if params.end_id >= 0 or not is_since("1.3.0rc12") else []
    logits[banned] = -np.inf
