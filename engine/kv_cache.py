"""KV cache management: the pool of blocks, the block tables of the running sequences, and prefix reuse."""

from collections.abc import Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockHash, blocks_for
from engine.scheduling.policies import AdmissionCandidate
from engine.sequence import NO_ROW, Sequence
from engine.types import EngineInfo


class KvCacheManager:
    """Hands blocks to sequences and finds cached prefixes. Used by the engine thread alone."""

    def __init__(self, info: EngineInfo, *, is_prefix_caching: bool) -> None:
        self._block_size = info.block_size
        self._is_prefix_caching = is_prefix_caching
        self.pool = BlockPool(info.num_blocks)
        self.tables = BlockTables(info.max_num_seqs, blocks_for(info.max_model_len, info.block_size))

    def candidates(
        self, waiting: Iterable[Sequence], running: Collection[Sequence]
    ) -> Iterator[AdmissionCandidate[Sequence]]:
        """Yield each of `waiting` with the cached blocks it can share, looked up when it is requested. The caller must
        admit each candidate before it requests the next one, unless the candidate is delayed."""
        being_computed: set[BlockHash] = set()
        if self._is_prefix_caching:
            for sequence in running:
                if sequence.num_tokens_left > 1:
                    being_computed.update(self._full_hashes(sequence)[sequence.num_computed // self._block_size :])
        for sequence in waiting:
            candidate = self._candidate(sequence, being_computed)
            if self._is_prefix_caching and not candidate.is_delayed:
                being_computed.update(self._full_hashes(sequence)[len(candidate.cached_blocks) :])
            yield candidate

    def _candidate(self, sequence: Sequence, being_computed: set[BlockHash]) -> AdmissionCandidate[Sequence]:
        if not self._is_prefix_caching or sequence.needs_prompt_logits:
            return AdmissionCandidate(sequence, sequence.num_tokens, (), 0, False)
        # The last token is always computed, because sampling needs its logits.
        num_shareable = (sequence.num_tokens - 1) // self._block_size
        hashes = sequence.block_hashes(num_shareable)
        blocks = self.pool.find(hashes)
        num_unreferenced = sum(self.pool.references(block) == 0 for block in blocks)
        is_delayed = len(blocks) < num_shareable and hashes[len(blocks)] in being_computed
        num_left = sequence.num_tokens - len(blocks) * self._block_size
        return AdmissionCandidate(sequence, num_left, tuple(blocks), num_unreferenced, is_delayed)

    def _full_hashes(self, sequence: Sequence) -> list[BlockHash]:
        return sequence.block_hashes(sequence.num_tokens // self._block_size)

    def start(self, candidate: AdmissionCandidate[Sequence]) -> None:
        """Open a block table for the sequence that begins with its cached prefix. All candidates of a plan must be
        started before any block is allocated, so that none of their prefixes is reclaimed."""
        sequence, blocks = candidate.sequence, list(candidate.cached_blocks)
        self.pool.share(blocks)
        sequence.table_row = self.tables.open()
        self.tables.append(sequence.table_row, blocks)
        sequence.num_allocated_blocks = sequence.num_indexed_blocks = len(blocks)
        sequence.num_computed = len(blocks) * self._block_size

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks that the sequence lacks to store `num_tokens`."""
        missing = blocks_for(num_tokens, self._block_size) - sequence.num_allocated_blocks
        if missing > 0:
            self.tables.append(sequence.table_row, self.pool.allocate(missing))
            sequence.num_allocated_blocks += missing

    def allocate_next(self, decoding: Iterable[Sequence]) -> None:
        """Allocate a block for the next token of each sequence whose blocks are full; most have room."""
        size = self._block_size
        for sequence in [s for s in decoding if s.num_computed == s.num_allocated_blocks * size]:
            self.allocate(sequence, sequence.num_computed + 1)

    def index_full_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Add the blocks that the last step filled to the prefix index. Finished sequences are skipped."""
        if not self._is_prefix_caching:
            return
        size = self._block_size
        filled = [s for s in sequences if s.num_computed >= (s.num_indexed_blocks + 1) * size and s.table_row != NO_ROW]
        for sequence in filled:
            num_full = sequence.num_computed // size
            hashes, blocks = sequence.block_hashes(num_full), self.tables.blocks(sequence.table_row)
            for position in range(sequence.num_indexed_blocks, num_full):
                self.pool.index(blocks[position], hashes[position])
            sequence.num_indexed_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of the sequence, and with them everything that was computed."""
        self.pool.release(self.tables.close(sequence.table_row))
        sequence.table_row = NO_ROW
        sequence.num_allocated_blocks = sequence.num_indexed_blocks = sequence.num_computed = 0

    def num_private_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks would be free without this sequence."""
        return sum(self.pool.references(block) == 1 for block in self.tables.blocks(sequence.table_row))

    def check(self, running: Collection[Sequence]) -> None:
        """Assert that the reference counts match the block tables of the running sequences."""
        self.pool.check()
        references: dict[int, int] = {}
        for sequence in running:
            blocks = self.tables.blocks(sequence.table_row)
            assert len(blocks) == sequence.num_allocated_blocks, "a sequence miscounts its blocks"
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                references[block] = references.get(block, 0) + 1
        num_used = self.pool.num_used
        assert len(references) == num_used, f"{num_used} blocks used, sequences hold {len(references)}"
        counts_match = all(self.pool.references(block) == count for block, count in references.items())
        assert counts_match, "references do not add up"


class BlockPool:
    """The free list, the reference counts and the prefix index of `num_blocks` blocks. Used by the engine thread alone.

    A block without references is free. A free block in the prefix index keeps its content until it is needed:
    unindexed blocks are allocated first (last in, first out, as they are still warm in the processor's cache), then
    indexed ones, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """Free blocks in the index, least recently used first."""
        self._references = [0] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be reused."""
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. The planner guarantees that there are enough."""
        assert count <= self.num_free, f"{count} blocks planned, {self.num_free} free"
        blocks = [self._empty.pop() if self._empty else self._reclaim() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _reclaim(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._block_of[self._hash_of.pop(block)]
        return block

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest indexed beginning of the chain `hashes`."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def index(self, block: int, block_hash: BlockHash) -> None:
        """Add a full block to the prefix index. If two sequences computed the same content, the first block stays."""
        if block not in self._hash_of and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which must be referenced or in the index."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is free and holds nothing"
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove one reference from each of `blocks`, which are in the order of a sequence's table. The end of a prefix
        is of no use without its beginning, so the last block is the first to be reclaimed."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def check(self) -> None:
        """Assert that each block is either free or referenced, none is listed twice, and the index is consistent."""
        free = {*self._empty, *self._cached}
        assert len(free) == self.num_free, "a block is in the free list twice"
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & used and len(free) + len(used) == self.num_blocks, "free and held blocks do not add up"
        assert self._hash_of.keys() >= self._cached.keys(), "a cached block is not in the index"
        assert not self._hash_of.keys() & set(self._empty), "an empty block is in the index"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "the two sides of the index differ"


class BlockTables:
    """The block tables of all running sequences, as rows of one array, so that numpy gathers a step's input."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self._rows = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._counts = np.zeros(max_num_seqs, np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def open(self) -> int:
        """Return an empty row for a sequence that starts to run."""
        return self._free_rows.pop()

    def close(self, row: int) -> list[int]:
        """Free the row; returns the blocks that were in it."""
        blocks = self.blocks(row)
        self._counts[row] = 0
        self._free_rows.append(row)
        return blocks

    def blocks(self, row: int) -> list[int]:
        blocks: list[int] = self._rows[row, : self._counts[row]].tolist()
        return blocks

    def append(self, row: int, blocks: list[int]) -> None:
        count = self._counts[row]
        self._rows[row, count : count + len(blocks)] = blocks
        self._counts[row] = count + len(blocks)

    def gather(self, rows: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return `block_indices` and `block_indices_begins` (see `StepBatch`) for these rows, in order."""
        index = np.array(rows, np.intp)
        counts = self._counts[index]
        begins = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=begins[1:])
        width = int(counts.max())
        is_filled = np.arange(width) < counts[:, None]
        return self._rows[index, :width][is_filled], begins
