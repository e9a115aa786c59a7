"""Events of TensorRT-LLM's KV cache: they are fetched from the LLM, or from 1.4 on published."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sluice.engine.delegated.cached_prefixes import CachedPrefixes, Told
from sluice.engine.delegated.kv_events import EventSubscriber, PublishedEvents
from sluice.engine.delegated.tensorrt_llm.statistics import follow, part_of
from sluice.errors import invalid

log = logging.getLogger(__name__)

GPU_LEVEL = 0


def published_events(arguments: Mapping[str, Any]) -> PublishedEvents | None:
    """Return where TensorRT-LLM publishes KV-cache events (1.4); None where they are fetched, or there are none."""
    config = getattr(arguments.get("kv_cache_config"), "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events or config.publisher == "null":
        return None
    return PublishedEvents(config.endpoint, config.replay_endpoint, config.topic)


def has_events(arguments: Mapping[str, Any]) -> bool:
    """Return whether the LLM of these arguments tells of its KV cache. Ranks of attention parallelism publish at an
    endpoint each, and have caches of their own, of which no one tells what a request will find."""
    cache = arguments.get("kv_cache_config")
    if not getattr(cache, "enable_block_reuse", True):
        return False
    if published_events(arguments) is not None:
        return not arguments.get("enable_attention_dp")
    return bool(getattr(cache, "event_buffer_max_size", 0))


def check_events(arguments: Mapping[str, Any]) -> None:
    """Raise INVALID where there are no events that could be published further."""
    if not has_events(arguments) or arguments.get("enable_attention_dp"):
        raise invalid(
            "kv_events_endpoint",
            "kv_events_endpoint needs KV blocks that TensorRT-LLM reuses and tells of: enable_block_reuse, a "
            "kv_cache_config.event_buffer_max_size above 0, and no enable_attention_dp",
        )


async def follow_events(
    llm: Any,
    arguments: Mapping[str, Any],
    prefixes: CachedPrefixes,
    name_of: Callable[[int], str],
    is_busy: asyncio.Event,
) -> None:
    """Read the events of an LLM of these arguments into the index until cancelled. `name_of` returns the name of an
    adapter by its number."""
    has_adapters = bool(arguments.get("enable_lora") or arguments.get("lora_config"))
    if (published := published_events(arguments)) is None:
        reader = EventReader(prefixes, has_adapters=has_adapters)

        def fetch(timeout: float) -> Any:
            return llm.get_kv_cache_events_async(timeout=timeout)

        await follow(fetch, reader.read, is_busy, "KV-cache events")
    else:
        await EventSubscriber(published, prefixes, partial(told_of_streamed, name_of, has_adapters)).run()


def told_of_streamed(name_of: Callable[[int], str], has_adapters: bool, event: Mapping[str, Any]) -> Told:
    """Return what a published event tells of the owner of its blocks: the number of the adapter, and no salt."""
    number = event.get("lora_id")
    if number is None:
        return Told(None, None if has_adapters else "")
    return Told(None, name_of(number))


class EventReader:
    """Reads KV-cache events into the index of cached prefixes. Events of unknown kinds are ignored."""

    def __init__(self, prefixes: CachedPrefixes, *, has_adapters: bool) -> None:
        self._prefixes = prefixes
        self._adapter = None if has_adapters else ""
        """The adapter of each block, as far as it is known: no event tells it."""
        self._last: dict[Any, int] = {}
        """The last event's number, by rank of attention parallelism."""
        self._place = (0, 0)
        """The attention window whose blocks count, and its group of layers, negative: requests reuse what all windows
        have, and the longest one has the most to lose."""

    def read(self, event: Mapping[str, Any]) -> None:
        rank, data = event.get("attention_dp_rank"), part_of(event, "data")
        self._count(rank, event.get("event_id"))
        place = (int(event.get("window_size") or 0), -int(event.get("layer_group_id") or 0))
        if place > self._place:
            self._place = place
            self._prefixes.begin_anew()
        if place < self._place:
            return
        match data.get("type"):
            case "stored":
                self._store(rank, data)
            case "removed":
                self._prefixes.remove([(rank, each) for each in data.get("block_hashes") or ()])
            case "updated":
                level = part_of(data, "cache_level").get("new_value")
                if level == GPU_LEVEL:
                    self._prefixes.move_in((rank, data.get("block_hash")))
                elif level is not None:
                    self._prefixes.remove([(rank, data.get("block_hash"))])

    def _count(self, rank: Any, number: Any) -> None:
        """Begin anew where events are missing: what nobody fetches in time is dropped."""
        if not isinstance(number, int):
            return
        last = self._last.get(rank, number - 1)
        if number != last + 1:
            log.warning("KV-cache events %d to %d were dropped; what is cached is learnt anew", last + 1, number - 1)
            self._prefixes.begin_anew()
        self._last[rank] = number

    def _store(self, rank: Any, data: Mapping[str, Any]) -> None:
        blocks, parent = data.get("blocks") or (), data.get("parent_hash")
        salt = (blocks[0].get("cache_salt") or None) if blocks else None  # null may be any: not all caches tell theirs
        self._prefixes.store(
            None if parent is None else (rank, parent),
            [((rank, each.get("block_hash")), _token_ids(each) if rank is None else None) for each in blocks],
            Told(salt, self._adapter),
        )
        elsewhere = [each for each in blocks if each.get("cache_level") not in (None, GPU_LEVEL)]
        self._prefixes.remove([(rank, each.get("block_hash")) for each in elsewhere])


def _token_ids(block: Mapping[str, Any]) -> list[int] | None:
    """Return a block's tokens; None where it has more than they say, such as a part of an image."""
    tokens = block.get("tokens") or ()
    ids = [each.get("token_id") for each in tokens if not each.get("token_extra_id")]
    is_text = len(ids) == len(tokens) and {*map(type, ids)} <= {int} and not block.get("mm_keys")
    return ids if is_text else None
