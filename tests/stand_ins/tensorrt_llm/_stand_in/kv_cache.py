"""The KV cache: physical blocks, which requests with the same prefix share, and its events.

The rules are those that TensorRT-LLM documents for one window without partial reuse: the whole blocks of a prompt can
be shared once its context is computed, the last token of a prompt is always computed, and of the blocks that nobody
holds the least recently released one is taken first.
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple


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
        self, num_blocks: int, tokens_per_block: int, *, reuses: bool, max_events: int = 0, window: int = 0
    ) -> None:
        self._size = tokens_per_block
        self._reuses = reuses
        self._window = window
        self._empty = list(range(num_blocks))
        self._idle: dict[int, None] = {}
        """Blocks in the index that nobody holds, the least recently released one first."""
        self._references: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}
        self._next_id = 0
        self._events: deque[str] = deque(maxlen=max_events)
        self._tell({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

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
        return Prefix(tuple(found), sum(block in self._references for block in found), missing)

    def share(self, request_id: int, prefix: Prefix) -> None:
        """Give a request the blocks of its prefix, before anybody gets new blocks."""
        assert request_id not in self._held, f"request {request_id} has blocks already"
        for block in prefix.blocks:
            self._idle.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
        self._held[request_id] = [*prefix.blocks]

    def begin(self, request_id: int, num_tokens: int, beam_width: int = 1) -> None:
        """Give a request the blocks that its context of `num_tokens` lacks. Beams share whole blocks."""
        whole, tail = divmod(num_tokens, self._size)
        self.grow(request_id, whole - len(self._held[request_id]) + bool(tail) * beam_width)

    def grow(self, request_id: int, count: int) -> None:
        """Give a request `count` more blocks."""
        assert count <= self.num_free, f"{count} blocks are needed, {self.num_free} are free"
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._references[block] = 1
            self._held[request_id].append(block)

    def store(self, request_id: int, token_ids: Sequence[int], root: int) -> None:
        """Let others reuse the whole blocks of a context that is computed."""
        if not self._reuses:
            return
        parent: int | None = None
        for place, block_hash in enumerate(self._hashes(token_ids, root)):
            block = self._held[request_id][place]
            if block_hash not in self._block_of:
                self._block_of[block_hash], self._hash_of[block] = block, block_hash
                self._tell_stored(block_hash, parent, token_ids[place * self._size : (place + 1) * self._size])
            parent = block_hash

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

    def take_events(self) -> list[str]:
        """Return the events since the last call, as JSON."""
        events = list(self._events)
        self._events.clear()
        return events

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._tell({"type": "removed", "block_hashes": [block_hash]})
        return block

    def _hashes(self, token_ids: Sequence[int], root: int) -> list[int]:
        hashes = []
        for end in range(self._size, len(token_ids) + 1, self._size):
            root = hash((root, *token_ids[end - self._size : end])) % 2**63
            hashes.append(root)
        return hashes

    def _tell_stored(self, block_hash: int, parent: int | None, token_ids: Sequence[int]) -> None:
        tokens = [{"token_id": token_id, "token_extra_id": 0} for token_id in token_ids]
        block = {"block_hash": block_hash, "tokens": tokens, "lora_id": None, "cache_level": 0, "priority": 35}
        self._tell({"type": "stored", "parent_hash": parent, "blocks": [block]})

    def _tell(self, data: dict[str, Any]) -> None:
        if self._events.maxlen:
            self._events.append(json.dumps({"event_id": self._next_id, "data": data, "window_size": self._window}))
            self._next_id += 1
