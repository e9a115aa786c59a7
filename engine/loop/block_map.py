"""A picture of the KV cache: the state and the owner of each block, or of some blocks together."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from sluice.engine.frames import OTHER_HOLDER, RESERVED, BlockMap, BlockOwner
from sluice.engine.kv_cache import BlockState, KvCacheManager
from sluice.engine.sequence import Sequence

MAX_CELLS = 4096
MAX_HOLDERS = 200
"""Most sequences that are named; the blocks of others are drawn as those of another one."""
MAX_ID_CHARS = 128
"""Clients choose ids of requests. What is longer is cut."""


def draw_block_map(
    kv: KvCacheManager, running: Collection[Sequence], num_reserved: int, max_cells: int = MAX_CELLS
) -> BlockMap:
    """Draw the blocks in the order of their numbers. `num_reserved` are those that `running` hold or may still need. A
    cell of several blocks has the state that most of those have that are held, else cached, so that a few sequences are
    seen in a large cache; of two as frequent ones the higher."""
    states = kv.block_states()
    num_shared = int(np.count_nonzero(states == BlockState.SHARED))
    named = sorted(running, key=lambda sequence: -sequence.num_allocated_blocks)
    numbers = (n if n <= MAX_HOLDERS else OTHER_HOLDER for n in range(1, len(named) + 1))
    owners = kv.block_owners(dict(zip((each.table_row for each in named), numbers, strict=True)))
    owners[kv.pool.next_blocks(max(0, num_reserved - kv.pool.num_used))] = RESERVED
    per_cell = max(1, -(-len(states) // max_cells))
    if per_cell > 1:
        blocks, states, owners = _pad(states, per_cell), _merge(states, per_cell), _pad(owners, per_cell)
        is_of_state = blocks == states[:, None]
        owners = owners[np.arange(len(states)), is_of_state.argmax(1)]
    holders = [_describe(sequence) for sequence in named[:MAX_HOLDERS]]
    return BlockMap(states.tobytes(), per_cell, num_shared, owners.tobytes(), holders)


def _merge(states: NDArray[np.uint8], per_cell: int) -> NDArray[np.uint8]:
    """Return the state of each cell."""
    num_cells, num_states = -(-len(states) // per_cell), len(BlockState)
    places = np.arange(len(states)) // per_cell * num_states + states
    counts = np.bincount(places, minlength=num_cells * num_states).reshape(num_cells, num_states)
    for state in (BlockState.FREE, BlockState.CACHED):  # it gives way to all above it
        counts[counts[:, state + 1 :].any(1), state] = 0
    return np.asarray(num_states - 1 - counts[:, ::-1].argmax(1), np.uint8)


def _pad(values: NDArray[np.uint8], per_cell: int) -> NDArray[np.uint8]:
    """Return the values of each cell, [num_cells, per_cell]; 0 beyond the last block."""
    padded = np.zeros((-(-len(values) // per_cell), per_cell), np.uint8)
    padded.reshape(-1)[: len(values)] = values
    return padded


def _describe(sequence: Sequence) -> BlockOwner:
    request_id = sequence.request.request_id[:MAX_ID_CHARS]
    return BlockOwner(request_id, sequence.num_allocated_blocks, sequence.worst_case_blocks)
