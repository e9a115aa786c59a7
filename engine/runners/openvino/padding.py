"""Steps of a number of tokens that suits the matrix kernels.

oneDNN's bf16 kernels work on tiles of 16 rows. A number of rows that does not divide well, 37 or 61, takes them
20 to 30 % longer than the next that does, and each new number is compiled when it is first met.
"""

import numpy as np

from engine.runners.base import StepBatch

FREE_UP_TO = 32
"""So few rows are bound by reading the weights, whatever their number."""
FINE_UP_TO = 64
FINE, COARSE = 4, 16
"""Multiples that are fast up to FINE_UP_TO rows, and beyond."""


def padded(batch: StepBatch, scratch_block: int) -> StepBatch:
    """`batch` with up to 15 sequences more of one token each; nobody samples them, and all write to `scratch_block`."""
    num_tokens = len(batch.token_ids)
    added = num_padding(num_tokens)
    if not added:
        return batch
    none, more = np.zeros(added, np.int32), np.arange(1, added + 1, dtype=np.int32)
    return StepBatch(
        token_ids=np.concatenate((batch.token_ids, none)),
        position_ids=np.concatenate((batch.position_ids, none)),
        past_lens=np.concatenate((batch.past_lens, none)),
        subsequence_begins=np.concatenate((batch.subsequence_begins, num_tokens + more)),
        block_indices=np.concatenate((batch.block_indices, none + scratch_block)),
        block_indices_begins=np.concatenate((batch.block_indices_begins, len(batch.block_indices) + more)),
        sampled_rows=batch.sampled_rows,
        max_context_len=batch.max_context_len,
    )


def num_padding(num_tokens: int) -> int:
    """How many tokens make a step of `num_tokens` a size that is fast."""
    if num_tokens <= FREE_UP_TO:
        return 0
    return -num_tokens % (FINE if num_tokens <= FINE_UP_TO else COARSE)
