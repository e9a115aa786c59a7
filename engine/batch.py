"""A step plan turned into the runner's flat arrays."""

from itertools import chain

import numpy as np

from engine.blocks import BlockTables
from engine.planner import StepPlan
from engine.runners.base import StepBatch
from engine.sequence import Sequence


def sampling_sequences(plan: StepPlan[Sequence]) -> list[Sequence]:
    """The sequences that get a token from this step, in the order of `StepBatch.sampled_rows`."""
    finished_prompts = [c.sequence for c in plan.prefill if c.num_tokens == c.sequence.num_prompt_left]
    return [*plan.decode, *finished_prompts]


def build_batch(plan: StepPlan[Sequence], tables: BlockTables) -> StepBatch:
    """The batch of `plan`; every sequence in it must hold blocks for its new tokens already."""
    prefill = [chunk.sequence for chunk in plan.prefill]
    sequences = [*plan.decode, *prefill]
    num_decode = len(plan.decode)
    lengths = np.ones(len(sequences), np.int32)
    lengths[num_decode:] = [chunk.num_tokens for chunk in plan.prefill]
    begins = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    past = np.array([sequence.num_computed for sequence in sequences], np.int32)
    is_sampling = np.ones(len(sequences), bool)
    is_sampling[num_decode:] = [chunk.num_tokens == chunk.sequence.num_prompt_left for chunk in plan.prefill]
    block_indices, block_indices_begins = tables.gather([sequence.slot for sequence in sequences])
    return StepBatch(
        token_ids=_token_ids(plan, num_decode),
        position_ids=np.arange(begins[-1], dtype=np.int32) + np.repeat(past - begins[:-1], lengths),
        past_lens=past,
        subsequence_begins=begins,
        block_indices=block_indices,
        block_indices_begins=block_indices_begins,
        sampled_rows=(begins[1:] - 1)[is_sampling],
        max_context_len=int((past + lengths).max()),
    )


def _token_ids(plan: StepPlan[Sequence], num_decode: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    decoding = np.fromiter((sequence.token_ids[-1] for sequence in plan.decode), np.int32, num_decode)
    if not plan.prefill:
        return decoding
    pieces = (chunk.sequence.next_prompt(chunk.num_tokens) for chunk in plan.prefill)
    return np.concatenate(list(chain((decoding,), pieces)))
