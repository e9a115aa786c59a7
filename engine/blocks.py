"""KV cache blocks: who holds which, and the table of each running sequence."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


def worst_case_blocks(prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Most blocks this sequence can ever hold.

    The last sampled token is returned but never fed back, so it needs no slot.
    """
    return blocks_for(prompt_tokens + max_tokens - 1, block_size)


class BlockPool:
    """The free list and the reference counts of `num_blocks` blocks. Used by the engine thread alone.

    A block is free while nobody references it. Freed blocks are handed out again last in, first out:
    the one that was just used is the one still warm in the processor's cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The planner promised them: fewer is our bug."""
        assert count <= len(self._free), f"{count} blocks planned, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are held already."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference to each of `blocks`."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check(self) -> None:
        """Assert that every block is either free or referenced, and none is listed twice."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & held and len(free) + len(held) == self.num_blocks, "free and held blocks do not add up"


class BlockTables:
    """The block tables of all running sequences as rows of one array, so that a step's
    input is gathered by numpy rather than token by token."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self._rows = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._counts = np.zeros(max_num_seqs, np.int32)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def open(self) -> int:
        """A row for a sequence that starts to run."""
        return self._free_slots.pop()

    def close(self, slot: int) -> list[int]:
        """End the row; returns the blocks it held."""
        blocks = self.blocks(slot)
        self._counts[slot] = 0
        self._free_slots.append(slot)
        return blocks

    def blocks(self, slot: int) -> list[int]:
        held: list[int] = self._rows[slot, : self._counts[slot]].tolist()
        return held

    def count(self, slot: int) -> int:
        return int(self._counts[slot])

    def append(self, slot: int, blocks: list[int]) -> None:
        count = self._counts[slot]
        self._rows[slot, count : count + len(blocks)] = blocks
        self._counts[slot] = count + len(blocks)

    def gather(self, slots: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`block_indices` and `block_indices_begins` (see `StepBatch`) for these rows in order."""
        index = np.array(slots, np.intp)
        counts = self._counts[index]
        begins = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=begins[1:])
        width = int(counts.max())
        is_held = np.arange(width) < counts[:, None]
        return self._rows[index, :width][is_held], begins
