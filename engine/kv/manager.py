"""The KV blocks of all sequences: who holds which, what can be shared, and the tables that the runner reads."""

from collections.abc import Collection, Iterable, Iterator

from engine.blocks import BlockHash, blocks_for
from engine.kv.pool import BlockPool
from engine.kv.tables import BlockTables
from engine.scheduling.policies import Candidate
from engine.sequence import NO_SLOT, Sequence
from engine.types import EngineInfo


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
