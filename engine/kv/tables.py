"""The block table of each running sequence."""

import numpy as np
from numpy.typing import NDArray


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
