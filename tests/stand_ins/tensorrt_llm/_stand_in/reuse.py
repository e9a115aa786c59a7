"""The prefix cache: the blocks of prompts that it remembers, and its events."""

import json
from collections import deque
from typing import Any


class Reuse:
    """Remembers full blocks of finished prompts, at most `num_blocks`; the oldest goes first."""

    def __init__(self, num_blocks: int, tokens_per_block: int, max_events: int, window: int, *, is_on: bool) -> None:
        self._num_blocks = num_blocks
        self._size = tokens_per_block
        self._is_on = is_on
        self._window = window
        self._stored: dict[int, None] = {}
        self._next_id = 0
        self._events: deque[str] = deque(maxlen=max_events)
        self._tell({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

    def cached_tokens(self, token_ids: list[int], root: int) -> int:
        """Return how many of the prompt's tokens need not be computed; the last one always is."""
        if not self._is_on:
            return 0
        found = 0
        for block_hash in self._hashes(token_ids, root):
            if block_hash not in self._stored:
                break
            found += 1
        return min(found * self._size, max(len(token_ids) - 1, 0)) // self._size * self._size

    def first_missing(self, token_ids: list[int], root: int) -> int | None:
        """Return the hash of the first missing block, None where nothing of the prompt could be reused."""
        if not self._is_on:
            return None
        return next((each for each in self._hashes(token_ids, root) if each not in self._stored), None)

    def store(self, token_ids: list[int], root: int) -> None:
        if not self._is_on:
            return
        parent: int | None = None
        for place, block_hash in enumerate(self._hashes(token_ids, root)):
            if block_hash not in self._stored:
                self._tell_stored(block_hash, parent, token_ids[place * self._size : (place + 1) * self._size])
            self._stored.pop(block_hash, None)
            self._stored[block_hash] = None
            parent = block_hash
        while len(self._stored) > self._num_blocks:
            oldest = next(iter(self._stored))
            del self._stored[oldest]
            self._tell({"type": "removed", "block_hashes": [oldest]})

    def take_events(self) -> list[str]:
        """Return the events since the last call, as JSON."""
        events = list(self._events)
        self._events.clear()
        return events

    def _hashes(self, token_ids: list[int], root: int) -> list[int]:
        hashes = []
        for end in range(self._size, len(token_ids) + 1, self._size):
            root = hash((root, *token_ids[end - self._size : end])) % 2**63
            hashes.append(root)
        return hashes

    def _tell_stored(self, block_hash: int, parent: int | None, token_ids: list[int]) -> None:
        tokens = [{"token_id": token_id, "token_extra_id": 0} for token_id in token_ids]
        block = {"block_hash": block_hash, "tokens": tokens, "lora_id": None, "cache_level": 0, "priority": 35}
        self._tell({"type": "stored", "parent_hash": parent, "blocks": [block]})

    def _tell(self, data: dict[str, Any]) -> None:
        self._events.append(json.dumps({"event_id": self._next_id, "data": data, "window_size": self._window}))
        self._next_id += 1
