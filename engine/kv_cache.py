"""KV cache management: the pool of blocks, the block tables of the running sequences, and prefix reuse."""

from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from itertools import islice
from time import perf_counter
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.engine.blocks import BlockHash, blocks_for
from sluice.engine.scheduling.planner import AdmissionCandidate
from sluice.engine.sequence import NO_ROW, Sequence
from sluice.engine.types import EngineInfo, Eviction

MAX_EVICTIONS = 1 << 15
"""Evicted blocks that are remembered at least; twice as many, some 10 MB, at most."""
MAX_CHANGES = 1 << 16
"""Most changes of the prefix index that are kept between two frames."""
H = TypeVar("H", bound=Sequence)
OnStored = Callable[[Sequence, int, list[BlockHash]], None]
"""Called with a sequence, a position and hashes: its blocks from there to the end of the hashes entered the index."""


class BlockState(IntEnum):
    """The state of a block in a picture of the cache."""

    FREE = 0
    CACHED = 1
    """Free, with content that can be reused."""
    OWNED = 2
    SHARED = 3
    """Held by several sequences."""


class KvCacheManager:
    """Hands blocks to sequences and finds cached prefixes. Used by the engine thread alone."""

    def __init__(
        self,
        info: EngineInfo,
        *,
        is_prefix_caching: bool,
        has_tiers: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """With `has_tiers`, the pool records the blocks that it reclaims."""
        self._clock = clock
        self._block_size = info.block_size
        self._is_prefix_caching = is_prefix_caching
        self.pool = BlockPool(info.num_blocks, records_reclaimed=has_tiers)
        self._on_stored: OnStored | None = None
        self.tables = BlockTables(info.max_num_seqs, blocks_for(info.max_model_len, info.block_size))

    def observe(self, on_stored: OnStored, on_removed: Callable[[BlockHash], None]) -> None:
        """Call these from now on with what enters and leaves the index."""
        self._on_stored = on_stored
        self.pool.on_removed = on_removed

    def candidates(self, waiting: Iterable[H], running: Collection[Sequence]) -> Iterator[AdmissionCandidate[H]]:
        """Yield each of `waiting` with the cached blocks it can share, looked up when it is requested. The caller must
        admit each candidate before it requests the next one, unless the candidate is delayed."""
        being_computed: set[BlockHash] | None = None
        for sequence in waiting:
            if being_computed is None:
                being_computed = self._hashes_being_computed(running)
            candidate = self._candidate(sequence, being_computed)
            if self._is_prefix_caching and not candidate.is_delayed:
                being_computed.update(self._full_hashes(sequence)[len(candidate.cached_blocks) :])
            yield candidate

    def _hashes_being_computed(self, running: Collection[Sequence]) -> set[BlockHash]:
        if not self._is_prefix_caching:
            return set()
        size = self._block_size
        return {
            block_hash
            for sequence in running
            if sequence.num_tokens - sequence.num_computed > 1
            or sequence.num_computed >= (sequence.num_indexed_blocks + 1) * size  # by a step under way
            for block_hash in self._full_hashes(sequence)[sequence.num_indexed_blocks :]
        }

    def _candidate(self, sequence: H, being_computed: set[BlockHash]) -> AdmissionCandidate[H]:
        if not self._is_prefix_caching or sequence.needs_prompt_logits:
            return AdmissionCandidate(sequence, sequence.num_tokens, (), 0, False)
        hashes = self.shareable_hashes(sequence)
        blocks = self.pool.find(hashes)
        num_unreferenced = sum(self.pool.references(block) == 0 for block in blocks)
        is_being_computed = len(blocks) < len(hashes) and hashes[len(blocks)] in being_computed
        is_delayed = is_being_computed or sequence.is_returning
        num_left = sequence.num_tokens - len(blocks) * self._block_size
        return AdmissionCandidate(sequence, num_left, tuple(blocks), num_unreferenced, is_delayed)

    def shareable_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Return the hashes of the blocks that the sequence may share. The last token is always computed, because
        sampling needs its logits."""
        return sequence.block_hashes((sequence.num_tokens - 1) // self._block_size)

    def _full_hashes(self, sequence: Sequence) -> list[BlockHash]:
        return sequence.block_hashes(sequence.num_tokens // self._block_size)

    def start(self, candidate: AdmissionCandidate[H]) -> None:
        """Open a block table for the sequence that begins with its cached prefix. All candidates of a plan must be
        started before any block is allocated, so that none of their prefixes is reclaimed."""
        sequence, blocks = candidate.sequence, list(candidate.cached_blocks)
        self.pool.share(blocks)
        sequence.table_row = self.tables.open()
        self.tables.append(sequence.table_row, blocks)
        sequence.num_allocated_blocks = sequence.num_indexed_blocks = len(blocks)
        sequence.num_computed = len(blocks) * self._block_size
        if sequence.request.session and not sequence.was_preempted:
            sequence.evicted = self._find_eviction(sequence, len(blocks))

    def _find_eviction(self, sequence: Sequence, num_cached: int) -> Eviction | None:
        """Return when the block after the sequence's cached ones was evicted, and for whom; None where it was not, or
        is forgotten."""
        if not self._is_prefix_caching or sequence.needs_prompt_logits:
            return None
        hashes = self.shareable_hashes(sequence)
        found = self.pool.eviction_of(hashes[num_cached]) if num_cached < len(hashes) else None
        return None if found is None else msgspec.structs.replace(found, age_s=self._clock() - found.age_s)

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks that the sequence lacks to store `num_tokens`."""
        missing = blocks_for(num_tokens, self._block_size) - sequence.num_allocated_blocks
        if missing > 0:
            if missing > self.pool.num_empty:
                request = sequence.request
                self.pool.reclaimed_for = Eviction(self._clock(), request.tenant, request.session)
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
            first = sequence.num_indexed_blocks
            stored = [n for n in range(first, num_full) if self.pool.index(blocks[n], hashes[n])]
            if self._on_stored is not None:
                for begin, end in _runs(stored):
                    self._on_stored(sequence, begin, hashes[:end])
            sequence.num_indexed_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of the sequence, and with them everything that was computed."""
        self.pool.release(self.tables.close(sequence.table_row))
        sequence.table_row = NO_ROW
        sequence.num_allocated_blocks = sequence.num_indexed_blocks = sequence.num_computed = 0

    def num_private_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks would be free without this sequence."""
        return sum(self.pool.references(block) == 1 for block in self.tables.blocks(sequence.table_row))

    def block_states(self) -> NDArray[np.uint8]:
        """Return the `BlockState` of each block, [num_blocks] uint8; a millisecond with 30,000 cached blocks."""
        references = np.bincount(self.tables.all_blocks(), minlength=self.pool.num_blocks)
        states = np.minimum(references, 2).astype(np.uint8)
        states[states > 0] += BlockState.OWNED - 1
        states[self.pool.cached_numbers()] = BlockState.CACHED
        return states

    def block_owners(self, numbers: dict[int, int]) -> NDArray[np.uint8]:
        """Return the owner of each block, [num_blocks] uint8: what `numbers` has for the row of its table, 0 for none.
        A block that several sequences share has one of them."""
        by_row = np.zeros(self.tables.num_rows, np.uint8)
        by_row[list(numbers.keys())] = list(numbers.values())
        owners = np.zeros(self.pool.num_blocks, np.uint8)
        owners[self.tables.all_blocks()] = np.repeat(by_row, self.tables.counts())
        return owners

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


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of rising numbers without a gap."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], numbers[i - 1] + 1
            begin = i


class BlockPool:
    """The free list, the reference counts and the prefix index of `num_blocks` blocks. Used by the engine thread alone.

    A block without references is free. A free block in the prefix index keeps its content until it is needed:
    unindexed blocks are allocated first (last in, first out, as they are still warm in the processor's cache), then
    indexed ones, least recently used first.
    """

    def __init__(self, num_blocks: int, *, records_reclaimed: bool = False) -> None:
        self.num_blocks = num_blocks
        self._records_reclaimed = records_reclaimed
        self._reclaimed: list[tuple[int, BlockHash]] = []
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """Free blocks in the index, least recently used first."""
        self._references = [0] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self.reclaimed_for = Eviction(0.0)
        """For whom blocks are reclaimed from now on, with the time in place of the age."""
        self._evictions: dict[BlockHash, Eviction] = {}
        self._older_evictions: dict[BlockHash, Eviction] = {}
        self.on_removed: Callable[[BlockHash], None] | None = None
        """Called with each hash that leaves the index."""
        self._changes: dict[BlockHash, bool] | None = None
        """Hashes that entered (True) or left the index since `take_changes`; None while nobody follows it."""

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_empty(self) -> int:
        """Free blocks that hold nothing, which are allocated before others."""
        return len(self._empty)

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
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._evictions[block_hash] = self.reclaimed_for
        if len(self._evictions) > MAX_EVICTIONS:
            self._older_evictions, self._evictions = self._evictions, {}
        if self._changes is not None:
            self._note(block_hash, False)
        if self.on_removed is not None:
            self.on_removed(block_hash)
        if self._records_reclaimed:
            self._reclaimed.append((block, block_hash))
        return block

    def eviction_of(self, block_hash: BlockHash) -> Eviction | None:
        """Return the last eviction of a block, with its time in place of the age; None where none is known."""
        return self._evictions.get(block_hash) or self._older_evictions.get(block_hash)

    def take_reclaimed(self) -> list[tuple[int, BlockHash]]:
        """Return the blocks that were reclaimed since the last call, in that order, with the hashes of what they held.
        They hold it until the next step writes to them."""
        reclaimed, self._reclaimed = self._reclaimed, []
        return reclaimed

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """Return the free blocks in the index with their hashes, most recently used first."""
        return [(block, self._hash_of[block]) for block in reversed(self._cached)]

    def cached_numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the free blocks in the index."""
        return np.fromiter(self._cached, np.int64, len(self._cached))

    def next_blocks(self, count: int) -> list[int]:
        """Return the free blocks that are allocated next, at most `count`."""
        empty = list(reversed(self._empty[max(0, len(self._empty) - count) :]))
        return [*empty, *islice(self._cached, count - len(empty))]

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest indexed beginning of the chain `hashes`."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def index(self, block: int, block_hash: BlockHash) -> bool:
        """Add a full block to the prefix index. If two sequences computed the same content, the first block stays.
        Returns whether the block was added."""
        if block in self._hash_of or block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        if self._changes is not None:
            self._note(block_hash, True)
        return True

    def hashes(self) -> list[BlockHash]:
        """Return the hashes in the index."""
        return [*self._block_of]

    def follow(self, is_followed: bool) -> None:
        """Begin or end to record what enters and leaves the index."""
        self._changes = {} if is_followed else None

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]] | None:
        """Return what entered and left the index since `follow` or the last call; None where that was too much to
        keep, so that who follows the index must read it anew."""
        changes, self._changes = self._changes, {}
        if changes is None or len(changes) > MAX_CHANGES:
            return None
        if all(changes.values()):  # as a rule
            return [*changes], []
        stored = [block_hash for block_hash, is_stored in changes.items() if is_stored]
        return stored, [block_hash for block_hash, is_stored in changes.items() if not is_stored]

    def _note(self, block_hash: BlockHash, is_stored: bool) -> None:
        assert self._changes is not None
        if len(self._changes) <= MAX_CHANGES:
            self._changes[block_hash] = is_stored

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

    @property
    def num_rows(self) -> int:
        return len(self._counts)

    def counts(self) -> NDArray[np.int32]:
        """Return how many blocks each row has, in their order in `all_blocks`."""
        return self._counts

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

    def all_blocks(self) -> NDArray[np.int32]:
        """Return the blocks of all sequences; one that several share is there as often."""
        width = int(self._counts.max(initial=0))
        return self._rows[:, :width][np.arange(width) < self._counts[:, None]]

    def gather(self, rows: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return `block_indices` and `block_indices_begins` (see `StepBatch`) for these rows, in order."""
        index = np.array(rows, np.intp)
        counts = self._counts[index]
        begins = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=begins[1:])
        width = int(counts.max())
        is_filled = np.arange(width) < counts[:, None]
        return self._rows[index, :width][is_filled], begins
