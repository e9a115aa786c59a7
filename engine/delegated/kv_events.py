"""Follows the events of a KV cache that a runtime publishes over ZeroMQ: vLLM, and TensorRT-LLM from 1.4 on."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from sluice.engine.delegated.cached_prefixes import CachedPrefixes, Told

log = logging.getLogger(__name__)

REPLAY_S = 5.0
"""How long what was missed may take to come again."""
RETRY_S = 10.0
"""Time to the next connection after one that failed."""
_END = -1
_GPU = "GPU"
_STORED = (
    "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
    "kv_cache_spec_kind kv_cache_spec_sliding_window"
)
_FIELDS = {"BlockStored": _STORED.split(), "BlockRemoved": ["block_hashes", "medium", "group_idx"]}
"""The fields of events that come as lists."""


@dataclass(frozen=True, slots=True)
class PublishedEvents:
    """Where a runtime on this machine publishes: the endpoints that it binds."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class EventSubscriber:
    """Reads published events into the index of cached prefixes. What was missed is asked for where there is a replay
    endpoint; without, the index begins anew."""

    def __init__(
        self, source: PublishedEvents, prefixes: CachedPrefixes, told: Callable[[Mapping[str, Any]], Told]
    ) -> None:
        """`told` says what a BlockStored event tells of the owner of its blocks."""
        self._source = source
        self._prefixes = prefixes
        self._told = told
        self._next = 0
        """The number of the next batch."""
        self._group: Any = None
        """The group of layers whose blocks count, the first that keeps all of a sequence; None for any."""

    async def run(self) -> None:
        """Read until cancelled. What goes wrong only costs what is known of the cache, and a warning."""
        while True:
            try:
                await self._follow()
            except Exception as error:
                log.warning("KV-cache events cannot be read: %s: %s", type(error).__name__, error)
            self._prefixes.begin_anew()
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
            context.linger = 0
            events.set_hwm(0)
            events.connect(_reachable(self._source.endpoint))
            events.subscribe(self._source.topic)
            if self._source.replay_endpoint is not None:
                await self._replay(context, self._source.replay_endpoint)
            while True:
                *_, number, payload = await events.recv_multipart()
                await self._take(context, int.from_bytes(number, "big"), payload)
                await asyncio.sleep(0)  # what has come already is given without a pause

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if number > self._next and self._source.replay_endpoint is not None:
            await self._replay(context, self._source.replay_endpoint)
        if number >= self._next:  # what is less came by replay
            self._apply(number, payload)

    async def _replay(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """Ask for the batches from the next one on. It answers those that it still has."""
        with context.socket(zmq.DEALER) as socket:
            socket.connect(_reachable(endpoint))
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            try:
                async with asyncio.timeout(REPLAY_S):
                    while True:
                        *_, number, payload = await socket.recv_multipart()
                        if int.from_bytes(number, "big", signed=True) == _END:
                            return
                        if (given := int.from_bytes(number, "big")) >= self._next:
                            self._apply(given, payload)
            except TimeoutError:
                log.warning("%s does not send the KV-cache events that were missed", endpoint)

    def _apply(self, number: int, payload: bytes) -> None:
        if number != self._next:
            log.warning("KV-cache events %d to %d are missing; what is cached is learnt anew", self._next, number - 1)
            self._prefixes.begin_anew()
        self._next = number + 1
        try:
            batch = msgspec.msgpack.decode(payload)
            for event in batch["events"] if isinstance(batch, dict) else batch[1]:
                self._read(event if isinstance(event, dict) else _named(event))
        except Exception as error:  # whatever a version makes of its events, the requests go on
            log.warning("a batch of KV-cache events cannot be read: %s: %s", type(error).__name__, error)
            self._prefixes.begin_anew()

    def _read(self, event: Mapping[str, Any]) -> None:
        kind, group = event["type"], event.get("group_idx")
        if kind == "AllBlocksCleared":
            self._prefixes.begin_anew()
        if event.get("medium") not in (None, _GPU):
            return
        if kind == "BlockStored":
            is_whole = event.get("kv_cache_spec_sliding_window") is None and event.get("kv_cache_spec_kind") != "mamba"
            if self._group is None and is_whole:
                self._group = group
            if group == self._group and is_whole:
                self._store(event)
        elif kind == "BlockRemoved" and group == self._group:
            self._prefixes.remove(event["block_hashes"])

    def _store(self, event: Mapping[str, Any]) -> None:
        size, token_ids, hashes = event["block_size"], event["token_ids"], event["block_hashes"]
        blocks = []
        for place, block_hash in enumerate(hashes):
            tokens = token_ids[place * size : (place + 1) * size]
            is_text = all(isinstance(each, int) for each in tokens) and not _has_more(event, place)
            blocks.append((block_hash, tokens if is_text else None))
        self._prefixes.store(event["parent_block_hash"], blocks, self._told(event))


def told_by_keys(event: Mapping[str, Any]) -> Told:
    """Return what an event of vLLM tells of the owner of its blocks: all. Its adapters have a number of ours behind
    their names."""
    name = event.get("lora_name") or ""
    keys = _keys(event, 0)
    return Told(str(keys[0]) if keys else "", name.rpartition("-")[0])


def _has_more(event: Mapping[str, Any], place: int) -> bool:
    """Return whether a block's content has more to it than tokens, adapter and salt: images, or given embeddings."""
    is_first = event["parent_block_hash"] is None and place == 0
    keys = _keys(event, place)
    has_others = len(keys) > 1 or not all(isinstance(each, str) for each in keys) if is_first else bool(keys)
    return has_others or any((event.get("mm_keys") or [()])[place : place + 1])


def _keys(event: Mapping[str, Any], place: int) -> Sequence[Any]:
    """Return what the hash of a block covers beside its tokens and its adapter."""
    extra_keys = event.get("extra_keys") or ()
    keys = extra_keys[place] if place < len(extra_keys) else None
    return [each for each in keys or () if each != event.get("lora_name")]


def _named(event: Sequence[Any]) -> dict[str, Any]:
    kind = event[0]
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))}


def _reachable(endpoint: str) -> str:
    """Return where to connect to what is bound at `endpoint` on this machine."""
    return endpoint.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:")
