"""A step plan turned into the runner's flat arrays."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine.kv.tables import BlockTables
from engine.runners.base import IntArray, StepBatch
from engine.scheduling.planner import StepPlan
from engine.sequence import Sequence


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
