"""Log probabilities in the shapes of OpenAI's two routes and in vLLM's."""

from collections.abc import Sequence
from typing import Any

from pipelines.text.types import TextLogprob, TokenText

LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot come."""


def chat_logprobs(entries: Sequence[TextLogprob], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = [
        {
            **_chat_token(entry.token, entry.logprob),
            "top_logprobs": [_chat_token(token, logprob) for token, logprob in entry.top[:num_top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.spelled)}


def completion_logprobs(entries: Sequence[TextLogprob], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion."""
    return {
        "text_offset": [entry.start for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "tokens": [entry.token.text for entry in entries],
        "top_logprobs": [_by_text(entry, num_top) for entry in entries],
    }


def _by_text(entry: TextLogprob, num_top: int) -> dict[str, float | None] | None:
    """The likeliest tokens and the one that came. Of several that read alike, the likeliest counts."""
    if entry.logprob is None:
        return None
    told: dict[str, float | None] = {}
    for token, logprob in (*entry.top[:num_top], (entry.token, entry.logprob)):
        told.setdefault(token.text, _finite(logprob))
    return told


def prompt_logprobs(entries: Sequence[TextLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, its own and the likeliest by token id."""
    return [_by_id(entry, num_top) for entry in entries]


def _by_id(entry: TextLogprob, num_top: int) -> dict[str, Any] | None:
    """`rank` counts from 1; it is null for a token that is not among those told."""
    if entry.logprob is None:
        return None
    ranks = {token.token_id: rank for rank, (token, _) in enumerate(entry.top, 1)}
    told = [(entry.token, entry.logprob), *entry.top[:num_top]]
    return {
        str(token.token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text,
        }
        for token, logprob in told
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
