"""Steps for a runner alone."""

import numpy as np

from sluice.engine.runners.base import StepBatch


def step_batch(past: list[int], new: list[int], block_size: int, num_blocks: int) -> StepBatch:
    """Make a step of sequences with so many past and new tokens, each in blocks of its own while there are enough."""
    tables = [-(-(before + added) // block_size) for before, added in zip(past, new, strict=True)]
    begins = np.cumsum([0, *new], dtype=np.int32)
    positions = [np.arange(before, before + added) for before, added in zip(past, new, strict=True)]
    return StepBatch(
        token_ids=np.arange(begins[-1], dtype=np.int32) % 4000 + 5,
        position_ids=np.concatenate(positions).astype(np.int32),
        past_lens=np.array(past, np.int32),
        subsequence_begins=begins,
        block_indices=np.arange(sum(tables), dtype=np.int32) % num_blocks,
        block_indices_begins=np.cumsum([0, *tables], dtype=np.int32),
        sampled_rows=begins[1:] - 1,
        max_context_len=max(before + added for before, added in zip(past, new, strict=True)),
    )
