"""Events of the prefix cache in vLLM's format over ZeroMQ, for routers that read it (llm-d, Dynamo, AIBrix)."""

import logging
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from sluice.engine.blocks import BlockHash
from sluice.engine.config import EngineConfig
from sluice.engine.sequence import Sequence
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

REPLAYED_BATCHES = 10_000
"""Most batches that are kept for subscribers who missed them, as many as in vLLM."""
MAX_UNSENT = 100_000
"""Batches that wait for a slow subscriber. It misses the next ones, and sees so by their numbers."""
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = "GPU"
"""vLLM's word for the memory of the device that computes, on CPUs too; its word CPU is for blocks moved out of it."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that follow one another entered the index. Routers compute their own hashes of `token_ids`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """For each block what its hash covers beside tokens: the adapter's name, and in a first block the cache salt."""


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks left the index."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """The index is empty: an engine says so when it starts."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events since the last batch; `ts` is in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def short_hash(block_hash: BlockHash) -> int:
    """Return a hash as events have it, its last 64 bits: Dynamo does not read the bytes that vLLM may send instead."""
    return int.from_bytes(block_hash[-8:], "big")


class KvEventPublisher:
    """Observes the KV cache and publishes what changes: a PUB socket for the batches, a ROUTER for those that somebody
    has missed. Used by the engine thread alone; nothing waits for a subscriber."""

    def __init__(self, config: EngineConfig, block_size: int, adapters: tuple[str, ...] = ()) -> None:
        """`adapters` are numbered from 1 on. Raises UNAVAILABLE for an endpoint that cannot be used."""
        assert config.kv_events_endpoint is not None
        self._block_size = block_size
        self._adapters = adapters
        self._topic = config.kv_events_topic.encode()
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAYED_BATCHES)
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(MAX_UNSENT)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            _open(self._publisher, config.kv_events_endpoint, "kv_events_endpoint")
            if config.kv_events_replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                _open(self._replay, config.kv_events_replay_endpoint, "kv_events_replay_endpoint", binds=True)
        except SluiceError:
            self.close()
            raise

    def on_stored(self, sequence: Sequence, position: int, hashes: list[BlockHash]) -> None:
        """Note that the blocks of a sequence from `position` on entered the index; `hashes` are those up to the last
        of them."""
        begin, end, size = position, len(hashes), self._block_size
        request = sequence.request
        self._note_stored(
            hashes[begin:],
            hashes[begin - 1] if begin else None,
            sequence.token_ids[begin * size : end * size],
            sequence.adapter,
            request.adapter,
            request.cache_salt,
        )

    def on_block_stored(
        self, block_hash: BlockHash, parent: BlockHash | None, token_ids: list[int], salt: str, adapter: str
    ) -> None:
        """Note that a block with these tokens entered the index."""
        number = self._adapters.index(adapter) + 1 if adapter in self._adapters else 0
        self._note_stored([block_hash], parent, token_ids, number, adapter, salt)

    def _note_stored(
        self,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        token_ids: list[int],
        adapter_number: int,
        adapter: str,
        salt: str,
    ) -> None:
        own = (adapter,) if adapter else ()
        first = (*own, salt) if salt and parent is None else own
        keys = [(first if number == 0 else own) or None for number in range(len(hashes))]
        self._events.append(
            BlockStored(
                block_hashes=[short_hash(each) for each in hashes],
                parent_block_hash=None if parent is None else short_hash(parent),
                token_ids=token_ids,
                block_size=self._block_size,
                lora_id=adapter_number or None,
                medium=_MEDIUM,
                lora_name=adapter or None,
                extra_keys=keys if any(keys) else None,
            )
        )

    def on_removed(self, block_hash: BlockHash) -> None:
        """Note that a block left the index."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(short_hash(block_hash))
        else:
            self._events.append(BlockRemoved([short_hash(block_hash)], _MEDIUM))

    def publish(self) -> None:
        """Publish what was noted since the last call, and answer who has missed something."""
        if self._events:
            payload = self._encoder.encode(EventBatch(time.time(), self._events, 0))
            self._publisher.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._kept.append((self._number, payload))
            self._number += 1
            self._events = []
        if self._replay is not None:
            self._answer(self._replay)

    def close(self) -> None:
        self._publisher.close(0)
        if self._replay is not None:
            self._replay.close(0)
        self._context.term()

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Send the batches from the asked number on, and a mark at the end."""
        while True:
            try:
                client, *rest = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(rest) != 2 or len(rest[1]) != 8:
                log.warning("a request for KV events is not an empty frame and a number of 8 bytes; it is ignored")
                continue
            first = int.from_bytes(rest[1], "big")
            for number, payload in self._kept:
                if number >= first:
                    message = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    replay.send_multipart(message, zmq.NOBLOCK)
            replay.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)


def _open(socket: "zmq.Socket[bytes]", endpoint: str, name: str, *, binds: bool = False) -> None:
    """Bind an endpoint of this machine (`*`, `0.0.0.0`, `::`, ipc), and connect to another. Raises UNAVAILABLE."""
    is_own = any(mark in endpoint for mark in ("*", "0.0.0.0", "::", "ipc://"))
    try:
        if binds or is_own:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        message = f"{name} {endpoint} cannot be used: {error.strerror}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param=name) from error
