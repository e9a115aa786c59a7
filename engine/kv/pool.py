"""KV cache blocks: who holds which, and which can be found again."""

from collections.abc import Iterable, Sequence

from engine.blocks import BlockHash


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
