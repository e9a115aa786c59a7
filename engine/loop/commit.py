"""What a step brought: logits to tokens, sequence by sequence, and draft tokens that the model agrees with."""

import numpy as np

from engine.loop.batch import BuiltBatch
from engine.runners.base import FloatArray
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import sample
from engine.sequence import NO_SLOT, Sequence
from engine.types import EventDetail, FinishReason, TokenEvent
from sluice.errors import SluiceError

Failure = tuple[Sequence, SluiceError]
Outcome = tuple[Sequence, FinishReason | None]
"""A sequence that got tokens, and why it ends with them, if it does."""


def take_tokens(
    built: BuiltBatch, logits: FloatArray, num_drafts: tuple[int, ...]
) -> tuple[list[Outcome], list[Failure]]:
    """Append what is sampled from `logits` [num_sampled, vocab_size] to every sequence that is still there.

    `num_drafts` belongs to the first of `built.sampling`. Returns the outcomes, and the sequences whose logits
    were not numbers or left no token to choose, each with the error. A draft token stays if it is the one that
    is sampled in its place, so speculation changes no output; what comes after the first that is not is dropped.
    """
    takers = [(s, row, 0) for s, row in zip(built.sampling, built.first_rows, strict=True) if s.slot != NO_SLOT]
    failed: dict[int, Failure] = {}
    if not num_drafts:
        first = _sample_once(takers, logits, failed)
        return [(taker[0], reason) for taker, reason in first], list(failed.values())
    granted = dict(zip((sequence.stream_id for sequence in built.sampling), num_drafts, strict=False))
    outcomes: dict[int, Outcome] = {}
    while takers:
        agreed = []
        for (sequence, row, position), reason in _sample_once(takers, logits, failed):
            outcomes[sequence.stream_id] = (sequence, reason)
            has_draft = reason is None and position < granted.get(sequence.stream_id, 0)
            if has_draft and sequence.drafts[position] == sequence.last_token_id:
                sequence.num_computed += 1
                agreed.append((sequence, row + 1, position + 1))
        takers = agreed
    return [outcome for stream_id, outcome in outcomes.items() if stream_id not in failed], list(failed.values())


Taker = tuple[Sequence, int, int]
"""A sequence, the row of logits that its next token comes from, and how many drafts it has had accepted."""


def _sample_once(
    takers: list[Taker], logits: FloatArray, failed: dict[int, Failure]
) -> list[tuple[Taker, FinishReason | None]]:
    """One token for each of `takers`; those that cannot have one go to `failed`."""
    is_every_row = len(takers) == len(logits)
    rows = None if is_every_row else np.array([row for _, row, _ in takers], np.intp)
    samples = sample(logits, [sequence.sampling for sequence, _, _ in takers], rows)
    errors = samples.failed
    logprobs = samples.logprobs or [None] * len(takers)
    took: list[tuple[Taker, FinishReason | None]] = []
    for index, (taker, token_id) in enumerate(zip(takers, samples.token_ids.tolist(), strict=True)):
        sequence = taker[0]
        try:
            if index in errors:
                raise errors[index]
            took.append((taker, sequence.append(token_id, logprobs[index])))
        except SluiceError as error:  # its constraint may have failed on the token too
            failed[sequence.stream_id] = (sequence, error)
    return took


def take_prompt_logprobs(built: BuiltBatch, logits: FloatArray) -> None:
    """Note how likely the prompt's tokens were; before sampling, which may write to the logits."""
    for rows in built.prompt_rows:
        sequence = rows.sequence
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        num_top = sequence.request.sampling.prompt_logprobs
        assert num_top is not None
        of_tokens = logits[rows.first_row : rows.first_row + len(rows.token_ids)]
        sequence.prompt_logprobs += prompt_logprobs(of_tokens, rows.token_ids, num_top)


def event_of(sequence: Sequence, reason: FinishReason | None) -> TokenEvent:
    """What `sequence` got since its last event, for its client."""
    token_ids, sequence.fresh_token_ids = sequence.fresh_token_ids, []
    if sequence.is_announced and not sequence.fresh_logprobs:
        return TokenEvent(sequence.stream_id, token_ids, reason)
    detail = EventDetail(
        num_cached_tokens=None if sequence.is_announced else sequence.num_cached_tokens,
        logprobs=sequence.fresh_logprobs or None,
        prompt_logprobs=sequence.prompt_logprobs or None,
    )
    sequence.is_announced = True
    sequence.fresh_logprobs, sequence.prompt_logprobs = [], []
    return TokenEvent(sequence.stream_id, token_ids, reason, detail)
