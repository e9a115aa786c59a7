"""The events of the KV cache, in the two ways that versions tell them: fetched, or published (1.4).

The forms are those of `KVCacheEventSerializer` and of the newer `kv_cache_events.py`. No version tells the adapter of
a block that is fetched; the salt is told by 1.3's cache, and null from the second cache manager, salted or not.
"""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from .settings import settings

_PRIORITY = 35


class CacheEvents:
    """Collects what an iteration changes. Written by the worker's thread."""

    def __init__(self, max_events: int, window: int, published: Any = None) -> None:
        """`published` is a KVEventsConfig that is on: then nothing can be fetched."""
        self._window = window
        self._next_id = 0
        self._pending: list[dict[str, Any]] = []
        self._kept: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._publisher = None if published is None else _Publisher(published)
        self._is_on = bool(max_events or published)

    def created(self, *num_blocks: int) -> None:
        self._tell({"type": "created", "num_blocks_per_cache_level": [*num_blocks]})

    def stored(
        self, parent: int | None, blocks: Sequence[tuple[int, Sequence[int]]], size: int, salt: str, adapter: int
    ) -> None:
        """New blocks that follow one another, the last of which may not be full."""
        if self._publisher is not None:
            self._publisher.stored(parent, [each for each in blocks if len(each[1]) == size], size, adapter)
        elif blocks:
            told = [_block(block_hash, token_ids, salt) for block_hash, token_ids in blocks]
            self._tell({"type": "stored", "parent_hash": parent, "blocks": told})

    def removed(self, block_hash: int) -> None:
        last = self._pending[-1]["data"] if self._pending else {}
        if self._publisher is not None:
            self._publisher.removed(block_hash)
        elif last.get("type") == "removed":
            last["block_hashes"].append(block_hash)
        else:
            self._tell({"type": "removed", "block_hashes": [block_hash]})

    def moved(self, block_hash: int, old: int, new: int) -> None:
        """A block is in another memory: 0 is that of the GPU."""
        level = {"type": "event_diff", "new_value": new, "old_value": old}
        self._tell({"type": "updated", "block_hash": block_hash, "cache_level": level, "priority": None})

    def flush(self) -> None:
        """An iteration is over. What is too much drops what came first."""
        self._kept.extend(self._pending)
        self._pending = []
        if self._publisher is not None:
            self._publisher.flush()

    def take(self) -> list[str]:
        """Return the events since the last call, as JSON."""
        events = [json.dumps(each) for each in self._kept]
        self._kept.clear()
        return events

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _tell(self, data: dict[str, Any]) -> None:
        if not self._is_on or self._publisher is not None:
            return
        event = {"event_id": self._next_id, "data": data, "window_size": self._window}
        if settings().version == "1.4.0":
            event |= {"hash_algo": "v1_block_key", "layer_group_id": 0}
        self._pending.append(event)
        self._next_id += 1


def _block(block_hash: int, token_ids: Sequence[int], salt: str) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in token_ids]
    block = {"type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": 0}
    told: dict[str, Any] = {**block, "priority": _PRIORITY}
    match settings().version:
        case "1.3.0":
            told |= {"mm_keys": [], "cache_salt": salt or None}
        case "1.4.0":
            told |= {"mm_keys": [], "cache_salt": None}
    return told


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


class _Publisher:
    """Sends a batch for each iteration with events, from a thread of its own, which answers who missed some."""

    def __init__(self, config: Any) -> None:
        self._topic = config.topic.encode()
        self._events: list[BlockStored | BlockRemoved] = []
        self._batches: queue.Queue[KVEventBatch | None] = queue.Queue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(config.endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        if config.replay_endpoint is not None:
            self._replay.bind(config.replay_endpoint)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._thread = threading.Thread(target=self._run, name="stand-in-kv-events", daemon=True)
        self._thread.start()

    def stored(self, parent: int | None, blocks: Sequence[tuple[int, Sequence[int]]], size: int, adapter: int) -> None:
        hashes, token_ids = [block_hash for block_hash, _ in blocks], [each for _, ids in blocks for each in ids]
        if hashes:
            self._events.append(BlockStored(hashes, parent, token_ids, size, adapter or None, "GPU", None))

    def removed(self, block_hash: int) -> None:
        self._events.append(BlockRemoved([block_hash], "GPU"))

    def flush(self) -> None:
        if self._events:
            self._batches.put(KVEventBatch(time.time(), self._events, 0))
            self._events = []

    def close(self) -> None:
        self._batches.put(None)
        self._thread.join()
        self._socket.close(0)
        self._replay.close(0)
        self._context.term()

    def _run(self) -> None:
        number = 0
        while True:
            if self._replay.poll(0):
                self._answer()
            try:
                batch = self._batches.get(timeout=0.02)
            except queue.Empty:
                continue
            if batch is None:
                return
            message = (number.to_bytes(8, "big"), msgspec.msgpack.encode(batch))
            self._socket.send_multipart((self._topic, *message))
            self._sent.append(message)
            number += 1

    def _answer(self) -> None:
        client, _, first = self._replay.recv_multipart()
        for number, payload in self._sent:
            if number >= first:
                self._replay.send_multipart((client, b"", self._topic, number, payload))
        self._replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
