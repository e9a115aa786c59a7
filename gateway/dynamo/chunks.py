"""Converts the engine's events into the chunks that Dynamo's front end reads."""

from typing import Any

from sluice.engine.types import FinishReason, TokenEvent, TokenLogprob

Chunk = dict[str, Any]


class ChunkWriter:
    """Writes the chunks of one answer."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self.num_tokens = 0
        """Tokens of the answer so far, with the one that ended it."""
        self._cached_tokens: int | None = None
        self._prompt_logprobs: list[dict[str, dict[str, float]] | None] | None = None

    def write(self, event: TokenEvent) -> Chunk:
        """Return the chunk of an event; the last one of an answer has its finish reason and its usage."""
        self.num_tokens += len(event.token_ids)
        chunk: Chunk = {"token_ids": event.token_ids, "index": 0}
        if (detail := event.detail) is not None:
            if detail.num_cached_tokens is not None:
                self._cached_tokens = detail.num_cached_tokens
            if detail.prompt_logprobs is not None:
                self._prompt_logprobs = [_prompt_entry(each) for each in detail.prompt_logprobs]
            if detail.logprobs is not None:
                chunk["log_probs"] = [each.logprob for each in detail.logprobs]
                if any(each.top for each in detail.logprobs):
                    chunk["top_logprobs"] = [_top_entries(each) for each in detail.logprobs]
        if event.finish_reason is not None:
            self._end(chunk, event.finish_reason)
        return chunk

    def cancelled(self) -> Chunk:
        """Return the last chunk of an answer that the client does not want any more."""
        chunk: Chunk = {"token_ids": [], "index": 0}
        self._end(chunk, FinishReason.CANCELLED)
        return chunk

    def _end(self, chunk: Chunk, reason: FinishReason) -> None:
        chunk["finish_reason"] = reason.value
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self._prompt_tokens + self.num_tokens,
        }
        if self._cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        chunk["completion_usage"] = usage
        if self._prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}


def _top_entries(logprob: TokenLogprob) -> list[dict[str, Any]]:
    """Return the likeliest tokens of a position, best first, and the chosen one where it is not among them. The front
    end has the tokenizer, and fills in the texts."""
    entries = [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": value}
        for rank, (token_id, value) in enumerate(logprob.top, 1)
    ]
    if all(token_id != logprob.token_id for token_id, _ in logprob.top):
        rank = len(entries) + 1
        entries.append({"rank": rank, "token_id": logprob.token_id, "token": None, "logprob": logprob.logprob})
    return entries


def _prompt_entry(logprob: TokenLogprob | None) -> dict[str, dict[str, float]] | None:
    """Return the log probabilities at a position of the prompt by token id; None for the first position."""
    if logprob is None:
        return None
    entries = {str(token_id): {"logprob": value} for token_id, value in logprob.top}
    entries.setdefault(str(logprob.token_id), {"logprob": logprob.logprob})
    return entries
