"""A step plan turned into the runner's flat arrays."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache import BlockTables
from engine.runners.base import FloatArray, IntArray, StepBatch
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import sample
from engine.scheduling.planner import StepPlan
from engine.sequence import NO_SLOT, Sequence
from engine.types import EventDetail, FinishReason, TokenEvent
from sluice.errors import SluiceError


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of logits, from `first_row`, that say how likely `token_ids` of the prompt were."""

    sequence: Sequence
    first_row: int
    token_ids: IntArray


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """The runner's input, and which rows of its answer belong to whom."""

    step: StepBatch
    sampling: list[Sequence]
    """Who gets tokens from this step."""
    first_rows: list[int]
    """The row of logits from which each of `sampling` gets its next token. Those of its drafts follow it."""
    prompt_rows: list[PromptRows]


def sampling_sequences(plan: StepPlan[Sequence]) -> list[Sequence]:
    """Who gets a token from this step: who decodes, and whose context ends in it."""
    finished = [c.sequence for c in plan.prefill if c.num_tokens == c.sequence.num_tokens_left]
    return [*plan.decode, *finished]


def build_batch(plan: StepPlan[Sequence], tables: BlockTables) -> BuiltBatch:
    """The batch of `plan`; every sequence in it must hold blocks for its new tokens already.

    A draft token stands as a subsequence of its own, with the block table of its sequence: kernels for one token
    and for many round differently, and a draft must be judged by the logits that decoding would have had.
    """
    decode, past = _decode_rows(plan)
    prefill = [chunk.sequence for chunk in plan.prefill]
    lengths = np.ones(len(decode) + len(prefill), np.int32)
    lengths[len(decode) :] = [chunk.num_tokens for chunk in plan.prefill]
    begins = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    past_lens = np.array(past + [sequence.num_computed for sequence in prefill], np.int32)
    num_rows = _rows_wanted(plan, len(decode))
    block_indices, block_indices_begins = tables.gather([sequence.slot for sequence in (*decode, *prefill)])
    step = StepBatch(
        token_ids=_token_ids(plan),
        position_ids=np.arange(begins[-1], dtype=np.int32) + np.repeat(past_lens - begins[:-1], lengths),
        past_lens=past_lens,
        subsequence_begins=begins,
        block_indices=block_indices,
        block_indices_begins=block_indices_begins,
        sampled_rows=_last_rows(begins[1:], num_rows),
        max_context_len=int((past_lens + lengths).max()),
    )
    return _with_owners(step, plan, num_rows, len(decode))


def _decode_rows(plan: StepPlan[Sequence]) -> tuple[list[Sequence], list[int]]:
    """The sequence of each token that decodes or is a draft, and how many tokens stand before it."""
    if not plan.num_drafts:
        return list(plan.decode), [sequence.num_computed for sequence in plan.decode]
    rows = [
        (sequence, sequence.num_computed + offset)
        for sequence, num_drafts in zip(plan.decode, plan.num_drafts, strict=True)
        for offset in range(num_drafts + 1)
    ]
    return [sequence for sequence, _ in rows], [past for _, past in rows]


def _rows_wanted(plan: StepPlan[Sequence], num_decode_rows: int) -> NDArray[np.int32]:
    """How many of its last tokens each subsequence wants logits of, [num_seqs]."""
    wanted = np.ones(num_decode_rows + len(plan.prefill), np.int32)
    for position, chunk in enumerate(plan.prefill, num_decode_rows):
        if chunk.sequence.wants_prompt_logprobs:
            wanted[position] = chunk.num_tokens
        elif chunk.num_tokens < chunk.sequence.num_tokens_left:
            wanted[position] = 0
    return wanted


def _last_rows(ends: IntArray, wanted: NDArray[np.int32]) -> IntArray:
    """The last `wanted[i]` indices before `ends[i]`, for all i one after the other."""
    if (wanted <= 1).all():
        single: IntArray = (ends - 1)[wanted == 1]
        return single
    starts = np.repeat(ends - np.cumsum(wanted), wanted)
    rows: IntArray = (starts + np.arange(wanted.sum())).astype(np.int32)
    return rows


def _with_owners(
    step: StepBatch, plan: StepPlan[Sequence], wanted: NDArray[np.int32], num_decode_rows: int
) -> BuiltBatch:
    begins = [0, *np.cumsum(wanted).tolist()]
    sampling = list(plan.decode)
    first_rows = _first_rows(plan.num_drafts) if plan.num_drafts else begins[:num_decode_rows]
    prompt_rows = []
    for position, chunk in enumerate(plan.prefill, num_decode_rows):
        sequence = chunk.sequence
        if sequence.wants_prompt_logprobs:
            prompt_rows.append(_prompt_rows(sequence, begins[position], chunk.num_tokens))
        if chunk.num_tokens == sequence.num_tokens_left:
            sampling.append(sequence)
            first_rows.append(begins[position + 1] - 1)
    return BuiltBatch(step, sampling, first_rows, prompt_rows)


def _first_rows(num_drafts: tuple[int, ...]) -> list[int]:
    ends = np.cumsum(np.array(num_drafts) + 1).tolist()
    return [0, *ends[:-1]]


def _prompt_rows(sequence: Sequence, first_row: int, num_tokens: int) -> PromptRows:
    """A row tells of the token after its own."""
    begin = sequence.num_computed + 1
    end = min(begin + num_tokens, sequence.num_prompt)
    return PromptRows(sequence, first_row, np.array(sequence.token_ids[begin:end], np.int32))


def _token_ids(plan: StepPlan[Sequence]) -> IntArray:
    if plan.num_drafts:
        rows = zip(plan.decode, plan.num_drafts, strict=True)
        decoding = np.array([t for s, count in rows for t in (s.last_token_id, *s.drafts[:count])], np.int32)
    else:
        decoding = np.fromiter((sequence.last_token_id for sequence in plan.decode), np.int32, len(plan.decode))
    if not plan.prefill:
        return decoding
    pieces = (chunk.sequence.next_tokens(chunk.num_tokens) for chunk in plan.prefill)
    return np.concatenate(list(chain((decoding,), pieces)))


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
