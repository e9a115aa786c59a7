"""A picture of the KV cache: the state of each block, or of some blocks together."""

import numpy as np

from engine.frames import BlockMap
from engine.kv_cache import BlockState, KvCacheManager

MAX_CELLS = 4096


def draw_block_map(kv: KvCacheManager, max_cells: int = MAX_CELLS) -> BlockMap:
    """Draw the blocks in the order of their numbers. A cell of several blocks has the state that most of those have
    that are not free, so that a few sequences are seen in a large cache; of two as frequent ones the higher."""
    states = kv.block_states()
    num_shared = int(np.count_nonzero(states == BlockState.SHARED))
    per_cell = max(1, -(-len(states) // max_cells))
    if per_cell > 1:
        num_cells, num_states = -(-len(states) // per_cell), len(BlockState)
        places = np.arange(len(states)) // per_cell * num_states + states
        counts = np.bincount(places, minlength=num_cells * num_states).reshape(num_cells, num_states)
        counts[:, BlockState.FREE] = counts[:, BlockState.FREE] == counts.sum(1)
        states = (num_states - 1 - counts[:, ::-1].argmax(1)).astype(np.uint8)
    return BlockMap(states.tobytes(), per_cell, num_shared)
