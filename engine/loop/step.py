"""One step's input and output: a plan becomes the runner's flat arrays, and logits become tokens and events."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Ids, IntArray
from sluice.engine.kv_cache import BlockTables
from sluice.engine.loop.recorder import Counters
from sluice.engine.runners.base import Draws, Logits, StepBatch
from sluice.engine.sampling.sampler import collect_draws, not_finite, sample
from sluice.engine.scheduling.planner import StepPlan
from sluice.engine.sequence import NO_ROW, Sequence
from sluice.engine.speculation.drafter import Drafter
from sluice.engine.types import EventDetail, FinishReason, SequenceMetrics, TokenEvent
from sluice.errors import SluiceError

SampledRow = tuple[Sequence, int, int]
"""A sequence, the row of logits that its next token is sampled from, and how many of its drafts were accepted."""
Outcome = tuple[Sequence, FinishReason | None]
"""A sequence that got tokens, and the finish reason if it ends with them."""
Failure = tuple[Sequence, SluiceError]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of logits of a chunk of a prompt, from `first_row` on. All but the prompt's last give the log probabilities
    of the tokens after them, `token_ids`."""

    sequence: Sequence
    first_row: int
    num_rows: int
    token_ids: IntArray
    is_first: bool
    """Whether the chunk begins the prompt."""


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """The runner's input, and which rows of its output belong to which sequence."""

    step: StepBatch
    sampling: list[Sequence]
    """Sequences that get tokens from this step."""
    first_rows: list[int]
    """The row of logits from which each of `sampling` gets its next token. The rows of its drafts follow."""
    prompt_rows: list[PromptRows]


# -- input


def build_batch(plan: StepPlan[Sequence], tables: BlockTables) -> BuiltBatch:
    """Build the batch of `plan`. Each sequence in it must have blocks for its new tokens already. Each draft token is a
    subsequence of its own, with the block table of its sequence: kernels for one token and for many round differently,
    and a draft must be checked against the logits that decoding would have had."""
    decode, past = _decode_rows(plan)
    prefill = [chunk.sequence for chunk in plan.prefill]
    lengths = np.ones(len(decode) + len(prefill), np.int32)
    lengths[len(decode) :] = [chunk.num_tokens for chunk in plan.prefill]
    begins = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    past_lens = np.array(past + [sequence.num_computed for sequence in prefill], np.int32)
    num_rows = _num_logit_rows(plan, len(decode))
    numbers = np.array([sequence.adapter for sequence in (*decode, *prefill)], np.int32)
    block_indices, block_indices_begins = tables.gather([sequence.table_row for sequence in (*decode, *prefill)])
    step = StepBatch(
        token_ids=_token_ids(plan),
        position_ids=np.arange(begins[-1], dtype=np.int32) + np.repeat(past_lens - begins[:-1], lengths),
        past_lens=past_lens,
        subsequence_begins=begins,
        block_indices=block_indices,
        block_indices_begins=block_indices_begins,
        sampled_rows=_last_rows(begins[1:], num_rows),
        max_context_len=int((past_lens + lengths).max()),
        adapters=np.repeat(numbers, lengths) if numbers.any() else None,
    )
    return _assign_rows(step, plan, num_rows, len(decode))


def _decode_rows(plan: StepPlan[Sequence]) -> tuple[list[Sequence], list[int]]:
    """Return the sequence of each decode and draft token, and how many tokens precede it."""
    if not plan.num_drafts:
        return list(plan.decode), [sequence.num_computed for sequence in plan.decode]
    rows = [
        (sequence, sequence.num_computed + offset)
        for sequence, num_drafts in zip(plan.decode, plan.num_drafts, strict=True)
        for offset in range(num_drafts + 1)
    ]
    return [sequence for sequence, _ in rows], [past for _, past in rows]


def _num_logit_rows(plan: StepPlan[Sequence], num_decode_rows: int) -> NDArray[np.int32]:
    """Return for how many of its last tokens each subsequence needs logits, [num_seqs]."""
    num_rows = np.ones(num_decode_rows + len(plan.prefill), np.int32)
    for position, chunk in enumerate(plan.prefill, num_decode_rows):
        if chunk.sequence.needs_prompt_logits:
            num_rows[position] = chunk.num_tokens
        elif chunk.num_tokens < chunk.sequence.num_tokens_left:
            num_rows[position] = 0
    return num_rows


def _last_rows(ends: IntArray, num_rows: NDArray[np.int32]) -> IntArray:
    """Return the last `num_rows[i]` indices before `ends[i]`, for each i in turn."""
    if (num_rows <= 1).all():
        single: IntArray = (ends - 1)[num_rows == 1]
        return single
    starts = np.repeat(ends - np.cumsum(num_rows), num_rows)
    rows: IntArray = (starts + np.arange(num_rows.sum())).astype(np.int32)
    return rows


def _assign_rows(
    step: StepBatch, plan: StepPlan[Sequence], num_rows: NDArray[np.int32], num_decode_rows: int
) -> BuiltBatch:
    begins = [0, *np.cumsum(num_rows).tolist()]
    sampling = list(plan.decode)
    first_rows = _first_rows(plan.num_drafts) if plan.num_drafts else begins[:num_decode_rows]
    prompt_rows = [  # a prompt's last token runs as decode if it is the only one left
        _prompt_rows(sequence, first_row, 1)
        for sequence, first_row in zip(sampling, first_rows, strict=False)
        if not sequence.has_emitted and sequence.needs_prompt_logits
    ]
    for position, chunk in enumerate(plan.prefill, num_decode_rows):
        sequence = chunk.sequence
        if sequence.needs_prompt_logits:
            prompt_rows.append(_prompt_rows(sequence, begins[position], chunk.num_tokens))
        if chunk.num_tokens == sequence.num_tokens_left:
            sampling.append(sequence)
            first_rows.append(begins[position + 1] - 1)
    return BuiltBatch(step, sampling, first_rows, prompt_rows)


def _first_rows(num_drafts: tuple[int, ...]) -> list[int]:
    ends = np.cumsum(np.array(num_drafts) + 1).tolist()
    return [0, *ends[:-1]]


def _prompt_rows(sequence: Sequence, first_row: int, num_tokens: int) -> PromptRows:
    """Return the rows of a chunk of the context. A token's row has the logits of the token after it."""
    start = sequence.num_computed
    num_rows = max(min(num_tokens, sequence.num_prompt - start), 0)
    followers = sequence.token_ids[start + 1 : min(start + 1 + num_tokens, sequence.num_prompt)]
    return PromptRows(sequence, first_row, num_rows, np.array(followers, np.int32), start == 0)


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


def draws_ahead(built: BuiltBatch) -> Draws | None:
    """Return the parameters of the rows that draw at random, of a step whose tokens the device chooses; None without
    any. The last token of a sequence may be unknown still."""
    drawing = [(s, row) for s, row in zip(built.sampling, built.first_rows, strict=True) if s.sampling.is_random]
    if not drawing:
        return None
    sequences, rows = zip(*drawing, strict=True)
    num_ahead = [int(sequence.last_token_id < 0) for sequence in sequences]
    return collect_draws([sequence.sampling for sequence in sequences], np.array(rows, np.intp), num_ahead)


# -- output


def commit_chosen(built: BuiltBatch, token_ids: Ids, peaks: FloatArray) -> tuple[list[Outcome], list[Failure]]:
    """Append the tokens that the device has chosen for each row to the sequences that still run. `peaks` are the rows'
    largest logits. Returns as `commit_tokens` does."""
    chosen, is_finite = token_ids.tolist(), np.isfinite(peaks).tolist()
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    for sequence, row in zip(built.sampling, built.first_rows, strict=True):
        if sequence.table_row == NO_ROW:
            continue
        sequence.num_pending = 0
        if is_finite[row]:
            outcomes.append((sequence, sequence.append(chosen[row])))
        else:
            failures.append((sequence, not_finite()))
    return outcomes, failures


def commit_tokens(
    built: BuiltBatch, logits: Logits, num_drafts: tuple[int, ...]
) -> tuple[list[Outcome], list[Failure]]:
    """Sample from the logits of the step and append the tokens to the sequences that still run.

    `num_drafts` belongs to the first of `built.sampling`. Returns the outcomes, and the sequences whose logits were
    not finite or left no token to choose, each with the error. A draft token is accepted if it is the one sampled in
    its place, so speculation changes no output; the drafts after the first rejected one are dropped.
    """
    rows = [(s, row, 0) for s, row in zip(built.sampling, built.first_rows, strict=True) if s.table_row != NO_ROW]
    failed: dict[int, Failure] = {}
    if not num_drafts:
        sampled = _sample_rows(rows, logits, failed)
        return [(row[0], reason) for row, reason in sampled], list(failed.values())
    granted = dict(zip((sequence.stream_id for sequence in built.sampling), num_drafts, strict=False))
    outcomes: dict[int, Outcome] = {}
    while rows:
        accepted = []
        for (sequence, row, position), reason in _sample_rows(rows, logits, failed):
            outcomes[sequence.stream_id] = (sequence, reason)
            has_draft = reason is None and position < granted.get(sequence.stream_id, 0)
            if has_draft and sequence.drafts[position] == sequence.last_token_id:
                sequence.num_computed += 1
                accepted.append((sequence, row + 1, position + 1))
        rows = accepted
    return [outcome for stream_id, outcome in outcomes.items() if stream_id not in failed], list(failed.values())


def _sample_rows(
    rows: list[SampledRow], logits: Logits, failed: dict[int, Failure]
) -> list[tuple[SampledRow, FinishReason | None]]:
    """Sample and append one token for each row; sequences that cannot have one are added to `failed`."""
    is_every_row = len(rows) == logits.num_rows
    indices = None if is_every_row else np.array([row for _, row, _ in rows], np.intp)
    kept = _keep_logits(rows, logits)  # sampling may edit them
    samples = sample(logits, [sequence.sampling for sequence, _, _ in rows], indices)
    token_ids = samples.token_ids.tolist()
    if samples.is_plain and not kept:
        return [(row, row[0].append(token_id)) for row, token_id in zip(rows, token_ids, strict=True)]
    errors = samples.failed
    logprobs = samples.logprobs or [None] * len(rows)
    sampled: list[tuple[SampledRow, FinishReason | None]] = []
    for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        sequence = row[0]
        try:
            if index in errors:
                raise errors[index]
            sampled.append((row, sequence.append(token_id, logprobs[index])))
            if kept and sequence.stream_id in kept:
                sequence.fresh_logits.append(kept[sequence.stream_id])
        except SluiceError as error:  # its constraint may have failed on the token too
            failed[sequence.stream_id] = (sequence, error)
    return sampled


def _keep_logits(rows: list[SampledRow], logits: Logits) -> dict[int, bytes]:
    """Return the logits that requests want, by stream."""
    wanted = [(sequence.stream_id, row) for sequence, row, _ in rows if sequence.request.returns_generation_logits]
    if not wanted:
        return {}
    stream_ids, indices = zip(*wanted, strict=True)
    return {
        stream_id: values.tobytes()
        for stream_id, values in zip(stream_ids, logits.read(np.array(indices, np.intp)), strict=True)
    }


def observe_drafts(plan: StepPlan[Sequence], drafter: Drafter, counters: Counters) -> None:
    """Tell the drafter how many of the step's drafts were accepted, and count them."""
    for sequence, num_drafts in zip(plan.decode, plan.num_drafts, strict=True):
        sequence.drafts = []
        if num_drafts and sequence.fresh_token_ids:
            num_accepted = min(len(sequence.fresh_token_ids) - 1, num_drafts)
            sequence.num_drafted += num_drafts
            sequence.num_accepted += num_accepted
            counters.draft_tokens += num_drafts
            counters.accepted_tokens += num_accepted
            drafter.observe(sequence, num_drafts, num_accepted)


def record_prompt(built: BuiltBatch, logits: Logits) -> None:
    """Record logits of prompts and log probabilities. Must come before sampling, which may edit the logits."""
    for rows in built.prompt_rows:
        sequence, first = rows.sequence, rows.first_row
        if rows.is_first:  # also where it begins anew, after a preemption
            sequence.prompt_logprobs, sequence.context_logits = [None], []
        if sequence.request.returns_context_logits:
            sequence.context_logits.append(logits.read(np.arange(first, first + rows.num_rows)).tobytes())
        num_top = sequence.request.sampling.prompt_logprobs
        if num_top is not None:
            num_tokens = len(rows.token_ids)
            indices = np.arange(first, first + num_tokens)
            sequence.prompt_logprobs += logits.logprobs(indices, rows.token_ids, [num_top] * num_tokens)


def take_event(sequence: Sequence, reason: FinishReason | None, now: float = 0.0) -> TokenEvent:
    """Return the event with everything new in `sequence` since its last one. `now` is the engine's clock."""
    token_ids, sequence.fresh_token_ids = sequence.fresh_token_ids, []
    timing = sequence.timing
    has_timing = timing is not None and (not sequence.has_emitted or bool(timing.pauses))
    if sequence.has_emitted and not sequence.has_details and not sequence.fresh_logprobs and not has_timing:
        return TokenEvent(sequence.stream_id, token_ids, reason)
    has_prompt_logprobs = sequence.request.sampling.prompt_logprobs is not None
    detail = EventDetail(
        num_cached_tokens=None if sequence.has_emitted else sequence.num_cached_tokens,
        evicted=None if sequence.has_emitted else sequence.evicted,
        logprobs=sequence.fresh_logprobs or None,
        prompt_logprobs=(sequence.prompt_logprobs or None) if has_prompt_logprobs else None,
        metrics=_metrics(sequence) if sequence.request.returns_metrics else None,
        context_logits=b"".join(sequence.context_logits) or None,
        generation_logits=b"".join(sequence.fresh_logits) or None,
        timing=timing.take(sequence.submitted_at, sequence.queue_s, now) if timing is not None and has_timing else None,
    )
    sequence.has_emitted = True
    sequence.fresh_logprobs, sequence.prompt_logprobs = [], []
    sequence.fresh_logits, sequence.context_logits = [], []
    return TokenEvent(sequence.stream_id, token_ids, reason, detail)


def _metrics(sequence: Sequence) -> SequenceMetrics:
    return SequenceMetrics(sequence.queue_s, sequence.num_drafted, sequence.num_accepted, sequence.predicted_wait_s)
