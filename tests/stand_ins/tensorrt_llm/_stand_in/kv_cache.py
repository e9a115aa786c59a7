"""The KV cache: physical blocks, which requests with the same prefix share.

The rules are those that TensorRT-LLM documents for one window without partial reuse: the whole blocks of a prompt can
be shared once its context is computed, those of prompt and answer once the request has ended, but for the last token,
which is always computed. Of the blocks that nobody holds the least recently released one is taken first. It moves to
the memory of the host where there is some, and comes back when it is shared; else what follows it goes with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .events import CacheEvents


class Prefix(NamedTuple):
    """What the cache holds of a prompt."""

    blocks: tuple[int, ...]
    """Blocks that a request with this prompt shares."""
    num_held: int
    """How many of them a request holds now."""
    first_missing: int | None
    """The hash of the first block that could be shared and is not there; None for none."""


class KvCache:
    """Blocks with reference counts, and an index of those whose content can be reused."""

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        reuses: bool,
        events: CacheEvents | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self._size = tokens_per_block
        self._num_blocks = num_blocks
        """The numbers from here on are blocks of the host, each of them once."""
        self._reuses = reuses
        self._empty = list(range(num_blocks))
        self._idle: dict[int, None] = {}
        """Blocks in the index that nobody holds, the least recently released one first."""
        self._num_host_blocks = num_host_blocks
        self._next_hosted = num_blocks
        self._hosted: dict[int, None] = {}
        """Blocks of the host in the index, the one that has been there for longest first."""
        self._references: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._followers: dict[int, set[int]] = {}
        """The hashes of the blocks in the index that follow one there."""
        self._held: dict[int, list[int]] = {}
        self._lost: set[int] = set()
        """Blocks in the index whose content is gone."""
        self.events = CacheEvents(0, 0) if events is None else events
        self.events.created(num_blocks, num_host_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._idle)

    def find(self, token_ids: Sequence[int], root: int) -> Prefix:
        if not self._reuses:
            return Prefix((), 0, None)
        found, missing = [], None
        for block_hash in self._hashes(token_ids[:-1], root):
            if block_hash not in self._block_of:
                missing = block_hash
                break
            found.append(self._block_of[block_hash])
        assert not self._lost & {*found}, "a block is found that a sleep has emptied"
        return Prefix(tuple(found), sum(block in self._references for block in found), missing)

    def share(self, request_id: int, prefix: Prefix) -> None:
        """Give a request the blocks of its prefix, before anybody gets new blocks."""
        assert request_id not in self._held, f"request {request_id} has blocks already"
        for block in prefix.blocks:
            if block < self._num_blocks:
                self._idle.pop(block, None)
                self._references[block] = self._references.get(block, 0) + 1
        for number, block in enumerate(held := [*prefix.blocks]):
            if block >= self._num_blocks:
                held[number] = self._bring_back(block)
        self._held[request_id] = held

    def begin(self, request_id: int, num_tokens: int, beam_width: int = 1) -> None:
        """Give a request the blocks that its context of `num_tokens` lacks. Beams share whole blocks."""
        whole, tail = divmod(num_tokens, self._size)
        self.grow(request_id, whole - len(self._held[request_id]) + bool(tail) * beam_width)

    def grow(self, request_id: int, count: int) -> None:
        """Give a request `count` more blocks."""
        assert count <= self.num_free, f"{count} blocks are needed, {self.num_free} are free"
        for _ in range(count):
            self._held[request_id].append(self._take())

    def _take(self) -> int:
        block = self._empty.pop() if self._empty else self._evict()
        self._references[block] = 1
        return block

    def _bring_back(self, hosted: int) -> int:
        block = self._take()
        if hosted in self._hosted:  # else what was taken has driven it out: it is computed anew
            del self._hosted[hosted]
            self.events.moved(self._move(hosted, block), 1, 0)
        return block

    def _move(self, source: int, target: int) -> int:
        block_hash = self._hash_of.pop(source)
        if source in self._lost:
            self._lost.remove(source)
            self._lost.add(target)
        self._hash_of[target], self._block_of[block_hash] = block_hash, target
        return block_hash

    def store(
        self,
        request_id: int,
        token_ids: Sequence[int],
        root: int,
        *,
        is_end: bool = False,
        salt: str = "",
        adapter: int = 0,
    ) -> None:
        """Let others reuse the whole blocks of what is computed; at the end of the request the rest too, which events
        tell though it is not found here."""
        if not self._reuses:
            return
        parent: int | None = None
        first: int | None = None
        new: list[tuple[int, Sequence[int]]] = []
        for place, block_hash in enumerate(self._hashes(token_ids, root, has_rest=is_end)):
            block = self._held[request_id][place]
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash], self._hash_of[block] = block, block_hash
                if parent is not None:
                    self._followers.setdefault(parent, set()).add(block_hash)
                first = first if new else parent
                new.append((block_hash, token_ids[place * self._size : (place + 1) * self._size]))
            parent = block_hash
        self.events.stored(first, new, self._size, salt, adapter)

    def release(self, request_id: int) -> None:
        """Take all blocks from a request; the end of a prefix goes before its beginning."""
        for block in reversed(self._held.pop(request_id, [])):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._empty.append(block)

    def num_private(self, request_id: int) -> int:
        """Return how many blocks would be free without this request."""
        return sum(self._references[block] == 1 for block in self._held.get(request_id, ()))

    def lose_contents(self) -> None:
        """Empty all blocks, as a sleep does. The index stays: versions differ in whether they reset it."""
        self._lost = {*self._hash_of}

    @property
    def stored_hashes(self) -> set[int]:
        """Hashes of the blocks on the GPU."""
        return {block_hash for block_hash, block in self._block_of.items() if block < self._num_blocks}

    def _evict(self) -> int:
        block = next(iter(self._idle))
        if len(self._hosted) == self._num_host_blocks:
            self._forget(self._hash_of[next(iter(self._hosted), block)])
        if block not in self._idle:  # it was forgotten itself, or followed what was
            return self._empty.pop()
        del self._idle[block]
        self._hosted[self._next_hosted] = None
        self.events.moved(self._move(block, self._next_hosted), 0, 1)
        self._next_hosted += 1
        return block

    def _forget(self, block_hash: int) -> None:
        """Remove a block and those that follow it from the index."""
        for follower in self._followers.pop(block_hash, ()):
            if follower in self._block_of:
                self._forget(follower)
        block = self._block_of.pop(block_hash)
        del self._hash_of[block]
        self._lost.discard(block)
        if block in self._hosted:
            del self._hosted[block]
        elif block in self._idle:
            del self._idle[block]
            self._empty.append(block)
        self.events.removed(block_hash)

    def _hashes(self, token_ids: Sequence[int], root: int, *, has_rest: bool = False) -> list[int]:
        hashes = []
        rest = self._size - 1 if has_rest else 0
        for end in range(self._size, len(token_ids) + 1 + rest, self._size):
            root = hash((root, *token_ids[end - self._size : end])) % 2**63
            hashes.append(root)
        return hashes
