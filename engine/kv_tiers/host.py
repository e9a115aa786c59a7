"""The host tier: contents of blocks in this process's memory, least recently used first out."""

from collections import OrderedDict

import numpy as np

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import BlockHash


class HostTier:
    """Rows of one buffer, each with the content of a block. Used by the engine thread alone; the disk's thread reads or
    fills the rows that are in transit.

    A row is free, kept under a hash, or in transit: it leaves for the disk, and can still be read under its hash, or it
    is filled from there. The buffer has `num_in_transit` rows beside the `num_blocks` that are kept.
    """

    def __init__(self, block_bytes: int, num_blocks: int, num_in_transit: int) -> None:
        """The system commits the buffer's memory when it is first written."""
        self.num_blocks = num_blocks
        num_rows = num_blocks + num_in_transit
        self._buffer = np.empty((num_rows, block_bytes), np.uint8)
        self._free = list(range(num_rows - 1, -1, -1))
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()
        """Least recently used first."""
        self._leaving: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._kept or block_hash in self._leaving

    def content(self, row: int) -> ByteArray:
        """Return the row's memory, [block_bytes]."""
        content: ByteArray = self._buffer[row]
        return content

    def find(self, block_hash: BlockHash) -> int:
        """Return the row that has the block's content, which counts as a use."""
        row = self._kept.get(block_hash)
        if row is None:
            return self._leaving[block_hash]
        self._kept.move_to_end(block_hash)
        return row

    def touch(self, block_hash: BlockHash) -> None:
        """Count a use of the block if it is kept."""
        if block_hash in self._kept:
            self._kept.move_to_end(block_hash)

    @property
    def is_full(self) -> bool:
        """Whether a block must go before another is kept."""
        return len(self._kept) >= self.num_blocks

    def oldest(self) -> BlockHash:
        """Return the least recently used of the kept blocks."""
        return next(iter(self._kept))

    def newest(self) -> list[BlockHash]:
        """Return the kept blocks, most recently used first."""
        return list(reversed(self._kept))

    def drop(self, block_hash: BlockHash) -> None:
        """Forget a kept block."""
        self._free.append(self._kept.pop(block_hash))

    def send(self, block_hash: BlockHash) -> int:
        """Begin to move a kept block away. Returns its row, which is read until `release`."""
        row = self._leaving[block_hash] = self._kept.pop(block_hash)
        return row

    def leave(self, block_hash: BlockHash, row: int) -> None:
        """Begin to move away a block whose content was filled into a row that was taken."""
        self._leaving[block_hash] = row

    def sent(self, block_hash: BlockHash) -> None:
        """End what `send` or `leave` began; the row is free."""
        self._free.append(self._leaving.pop(block_hash))

    def take(self) -> int:
        """Take a free row to fill. It must end in `keep` or `give_back`."""
        return self._free.pop()

    def keep(self, block_hash: BlockHash, row: int) -> None:
        """Keep a filled row under its hash, as the most recently used. There must be room, and none of that hash."""
        assert not self.is_full and block_hash not in self, "a row too many"
        self._kept[block_hash] = row

    def give_back(self, row: int) -> None:
        """Free a row that was taken and not filled."""
        self._free.append(row)

    def check(self, num_filling: int) -> None:
        """Assert that each row is in one place, `num_filling` of them taken and not yet kept."""
        rows = [*self._free, *self._kept.values(), *self._leaving.values()]
        assert len(set(rows)) == len(rows), "a row is in two places"
        assert len(rows) + num_filling == len(self._buffer), "rows do not add up"
        assert len(self._kept) <= self.num_blocks, "more blocks than there is room for"
        assert not self._kept.keys() & self._leaving.keys(), "a block is kept twice"
