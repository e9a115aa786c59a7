"""The KV blocks of all sequences: who holds which, what can be shared, and the tables that the runner reads."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockHash, blocks_for
from engine.scheduling.policies import Candidate
from engine.sequence import NO_SLOT, Sequence
from engine.types import EngineInfo


class BlockPool:
    """The free list, the reference counts and the prefix index of `num_blocks` blocks. Used by the engine thread alone.

    A block is free while nobody references it. A free block that is in the index keeps its content until it is
    needed: blocks without one are handed out first (last in, first out: still warm in the processor's cache), then
    indexed ones, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """Free and in the index; the order of the keys is that of their last use."""
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
        """`count` blocks with one reference each. The planner promised them: fewer is our bug."""
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
        """The blocks that hold the longest known beginning of the chain `hashes`."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def index(self, block: int, block_hash: BlockHash) -> None:
        """Make a full block findable. Where two sequences computed the same, the first stays the one that is found."""
        if block not in self._hash_of and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are held or in the index."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is free and holds nothing"
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks`, a sequence's in order.

        The end of a prefix is of no use without its beginning, so the last one is the first to be reclaimed.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def check(self) -> None:
        """Assert that every block is either free or referenced, none is listed twice, and the index is sound."""
        free = {*self._empty, *self._cached}
        assert len(free) == self.num_free, "a block is in the free list twice"
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & held and len(free) + len(held) == self.num_blocks, "free and held blocks do not add up"
        assert self._hash_of.keys() >= self._cached.keys(), "a cached block is not in the index"
        assert not self._hash_of.keys() & set(self._empty), "an empty block is in the index"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "the two sides of the index differ"


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


class KvCacheManager:
    """Block pool, block tables and prefix reuse of one engine. Used by the engine thread alone."""

    def __init__(self, info: EngineInfo, *, is_prefix_caching: bool) -> None:
        self._block_size = info.block_size
        self._is_prefix_caching = is_prefix_caching
        self.pool = BlockPool(info.num_blocks)
        self.tables = BlockTables(info.max_num_seqs, blocks_for(info.max_model_len, info.block_size))

    def candidates(self, waiting: Iterable[Sequence], running: Collection[Sequence]) -> Iterator[Candidate[Sequence]]:
        """Each of `waiting` with what it can share, worked out when it is asked for.

        Who asks for the next one has taken the last, unless it is delayed.
        """
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

    def _candidate(self, sequence: Sequence, being_computed: set[BlockHash]) -> Candidate[Sequence]:
        if not self._is_prefix_caching or sequence.wants_prompt_logprobs:
            return Candidate(sequence, sequence.num_tokens, (), 0, False)
        # The last token is always computed: sampling needs its logits.
        num_shareable = (sequence.num_tokens - 1) // self._block_size
        hashes = sequence.block_hashes(num_shareable)
        blocks = self.pool.find(hashes)
        num_revived = sum(self.pool.references(block) == 0 for block in blocks)
        is_delayed = len(blocks) < num_shareable and hashes[len(blocks)] in being_computed
        num_left = sequence.num_tokens - len(blocks) * self._block_size
        return Candidate(sequence, num_left, tuple(blocks), num_revived, is_delayed)

    def _full_hashes(self, sequence: Sequence) -> list[BlockHash]:
        return sequence.block_hashes(sequence.num_tokens // self._block_size)

    def start(self, candidate: Candidate[Sequence]) -> None:
        """Give the sequence a block table that begins with its cached prefix.

        All candidates of a plan are started before any block is allocated, so that none of their prefixes is
        reclaimed.
        """
        sequence, blocks = candidate.sequence, list(candidate.cached_blocks)
        self.pool.share(blocks)
        sequence.slot = self.tables.open()
        self.tables.append(sequence.slot, blocks)
        sequence.num_held_blocks = sequence.num_indexed_blocks = len(blocks)
        sequence.num_computed = len(blocks) * self._block_size

    def hold(self, sequence: Sequence, num_tokens: int) -> None:
        """See that the sequence's blocks have room for `num_tokens`."""
        missing = blocks_for(num_tokens, self._block_size) - sequence.num_held_blocks
        if missing > 0:
            self.tables.append(sequence.slot, self.pool.allocate(missing))
            sequence.num_held_blocks += missing

    def hold_next(self, decoding: Iterable[Sequence]) -> None:
        """See that each of `decoding` has room for its next token; most have."""
        size = self._block_size
        for sequence in [s for s in decoding if s.num_computed == s.num_held_blocks * size]:
            self.hold(sequence, sequence.num_computed + 1)

    def index(self, sequences: Iterable[Sequence]) -> None:
        """Make the blocks that the last step filled findable for others. Sequences that are gone are passed over."""
        if not self._is_prefix_caching:
            return
        size = self._block_size
        filled = [s for s in sequences if s.num_computed >= (s.num_indexed_blocks + 1) * size and s.slot != NO_SLOT]
        for sequence in filled:
            num_full = sequence.num_computed // size
            hashes, blocks = sequence.block_hashes(num_full), self.tables.blocks(sequence.slot)
            for position in range(sequence.num_indexed_blocks, num_full):
                self.pool.index(blocks[position], hashes[position])
            sequence.num_indexed_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from the sequence, and with them what was computed."""
        self.pool.release(self.tables.close(sequence.slot))
        sequence.slot = NO_SLOT
        sequence.num_held_blocks = sequence.num_indexed_blocks = sequence.num_computed = 0

    def private_blocks(self, sequence: Sequence) -> int:
        """Blocks that would be free without this sequence."""
        return sum(self.pool.references(block) == 1 for block in self.tables.blocks(sequence.slot))

    def check(self, running: Collection[Sequence]) -> None:
        """Assert that every block is held by just the sequences that have it in their tables."""
        self.pool.check()
        held: dict[int, int] = {}
        for sequence in running:
            blocks = self.tables.blocks(sequence.slot)
            assert len(blocks) == sequence.num_held_blocks, "a sequence miscounts its blocks"
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        assert len(held) == self.pool.num_used, f"{self.pool.num_used} blocks used, sequences hold {len(held)}"
        assert all(self.pool.references(block) == count for block, count in held.items()), "references do not add up"
