"""Events of a KV cache that a runtime publishes, in vLLM's form and in TensorRT-LLM's, as they reach the index."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sluice.engine.blocks import BlockHash, HashChain
from sluice.engine.config import EngineConfig
from sluice.engine.delegated.cached_prefixes import CachedPrefixes, Owner, Told
from sluice.engine.delegated.kv_events import EventSubscriber, PublishedEvents, told_by_keys
from sluice.engine.delegated.tensorrt_llm.events import published_events as of_tensorrt_llm
from sluice.engine.delegated.tensorrt_llm.events import told_of_streamed
from sluice.engine.delegated.vllm.llm import load_llm as load_vllm
from sluice.engine.delegated.vllm.statistics import published_events as of_vllm
from sluice.engine.process.kv_events import KvEventPublisher
from sluice.errors import SluiceError
from tests.waiting import until

SIZE = 4
PLAIN = Owner("", "")


def tokens(*blocks: int) -> list[int]:
    return [block + place for block in blocks for place in range(SIZE)]


def chain(token_ids: list[int], owner: Owner = PLAIN) -> list[BlockHash]:
    return HashChain(owner.salt, SIZE, owner.adapter).hashes(token_ids, len(token_ids) // SIZE)


class Published:
    """Our own publisher of vLLM's events, for an index that follows it."""

    def __init__(self, folder: Path, *, has_replay: bool) -> None:
        replay = f"ipc://{folder}/replay" if has_replay else None
        self.source = PublishedEvents(f"ipc://{folder}/events", replay, "kv")
        config = EngineConfig(
            model_path="m",
            kv_events_endpoint=self.source.endpoint,
            kv_events_replay_endpoint=replay,
            kv_events_topic="kv",
        )
        self.publisher = KvEventPublisher(config, SIZE)
        self.prefixes = CachedPrefixes(SIZE)

    def store(self, *blocks: int) -> None:
        """Publish the last of these blocks, which follow one another."""
        hashes = chain(tokens(*blocks))
        parent = hashes[-2] if len(hashes) > 1 else None
        self.publisher.on_block_stored(hashes[-1], parent, tokens(blocks[-1]), "", "")
        self.publisher.publish()

    async def until(self, *blocks: int) -> None:
        """Wait until the index has these blocks alone; the publisher goes on meanwhile, as an engine does."""
        async with asyncio.timeout(20):
            while {*self.prefixes.hashes()} != {each for block in blocks for each in chain(tokens(block))}:
                self.publisher.publish()
                await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(folder: Path, *, has_replay: bool) -> AsyncIterator[Published]:
    published = Published(folder, has_replay=has_replay)
    subscriber = EventSubscriber(published.source, published.prefixes, told_by_keys)
    task = asyncio.create_task(subscriber.run())
    try:
        yield published
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        published.publisher.close()


async def test_what_came_before_and_what_was_missed_comes_by_replay(tmp_path: Path) -> None:
    async with followed(tmp_path, has_replay=True) as published:
        published.store(10)
        await published.until(10)
        published.publisher._number += 1  # as after a batch that could not be sent
        published.store(20)
        await published.until(20)  # it is not there any more, so that the index begins anew


async def test_without_replay_a_gap_begins_anew(tmp_path: Path) -> None:
    async with followed(tmp_path, has_replay=False) as published:
        for number in range(1000):  # what is published before the subscriber is known does not reach it
            published.store(100 * number)
            await asyncio.sleep(0.005)
            if published.prefixes.hashes():
                break
        published.publisher._number += 1
        published.store(10)
        await published.until(10)


def subscriber(prefixes: CachedPrefixes, told: Any = told_by_keys) -> EventSubscriber:
    return EventSubscriber(PublishedEvents("ipc:///nowhere"), prefixes, told)


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def stored(*blocks: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    own = {"block_hashes": [*blocks], "parent_block_hash": parent, "token_ids": tokens(*blocks), "block_size": SIZE}
    return {"type": "BlockStored", **own, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def test_every_form_of_vllm_is_read() -> None:
    prefixes = CachedPrefixes(SIZE)
    reader = subscriber(prefixes)
    as_list = ["BlockStored", [b"ten", b"twenty"], None, tokens(10, 20), SIZE, None, "GPU", None]
    reader._apply(0, batch(as_list))
    assert prefixes.hashes() == chain(tokens(10, 20))
    removed = {"type": "BlockRemoved", "block_hashes": [b"twenty"], "medium": "GPU"}
    reader._apply(1, msgspec.msgpack.encode({"ts": 1.0, "events": [removed, {**removed, "medium": "CPU"}]}))
    assert prefixes.hashes() == chain(tokens(10))
    reader._apply(2, batch(["AllBlocksCleared"]))
    assert prefixes.hashes() == []


@pytest.mark.parametrize(
    ("fields", "owner"),
    [
        ({"extra_keys": [("tenant",), None]}, Owner("tenant", "")),
        ({"extra_keys": [("fr-3", "tenant"), ("fr-3",)], "lora_name": "fr-3", "lora_id": 3}, Owner("tenant", "fr")),
        ({"extra_keys": [None, None]}, PLAIN),
    ],
)
def test_the_owner_is_told_by_vllm(fields: dict[str, Any], owner: Owner) -> None:
    prefixes = CachedPrefixes(SIZE)
    subscriber(prefixes)._apply(
        0, batch(stored(10, 20, **fields), stored(30, parent=20, lora_name=fields.get("lora_name")))
    )
    assert prefixes.hashes() == chain(tokens(10, 20, 30), owner)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [("an image", "tenant"), None]},
        {"extra_keys": [(["an image", 3],), None]},
        {"mm_keys": [[{"hash": "ab", "start_offset": 0}], []]},
        {"token_ids": ["ab", *tokens(10, 20)[1:]]},
        {"block_size": 2, "block_hashes": [1, 2, 3, 4]},
        {"kv_cache_spec_sliding_window": 128},
        {"medium": "CPU"},
    ],
)
def test_what_is_more_than_tokens_or_no_whole_cache_has_no_name(fields: dict[str, Any]) -> None:
    prefixes = CachedPrefixes(SIZE)
    subscriber(prefixes)._apply(0, batch(stored(10, 20, **fields)))
    assert prefixes.hashes() == []


def test_a_batch_that_cannot_be_read_begins_anew() -> None:
    prefixes = CachedPrefixes(SIZE)
    reader = subscriber(prefixes)
    reader._apply(0, batch(stored(10)))
    for number, event in enumerate(({"type": "BlockStored"}, stored(20, lora_name=7)), 1):
        reader._apply(number, batch(event))
        assert prefixes.hashes() == []
    reader._apply(3, batch(stored(20, parent=10)))
    assert prefixes.hashes() == chain(tokens(10, 20))


async def test_what_cannot_be_followed_is_not_known_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    prefixes = CachedPrefixes(SIZE)
    prefixes.store(None, [(1, tokens(10))], Told("", ""))
    following = asyncio.create_task(EventSubscriber(PublishedEvents("nonsense"), prefixes, told_by_keys).run())
    await until(lambda: not prefixes.hashes())
    assert "KV-cache events cannot be read: ZMQError" in caplog.text and not following.done()
    following.cancel()


def test_tensorrt_llm_tells_the_adapter_and_no_salt() -> None:
    prefixes = CachedPrefixes(SIZE)
    reader = subscriber(prefixes, partial(told_of_streamed, {1: "fr"}.__getitem__, True))
    for number, owner in enumerate((Owner("", "fr"), PLAIN)):
        prefixes.hand_over(number, tokens(10), owner)
    reader._apply(0, batch(stored(10, lora_id=1)))
    assert prefixes.hashes() == chain(tokens(10), Owner("", "fr"))


def test_where_events_are_published() -> None:
    told = {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "kv", "publisher": "zmq"}
    on = SimpleNamespace(enable_kv_cache_events=True, **told)
    expected = PublishedEvents("tcp://*:5557", None, "kv")
    assert of_tensorrt_llm({"kv_cache_config": SimpleNamespace(kv_events_config=on)}) == expected
    config = SimpleNamespace(
        kv_events_config=on,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    assert of_vllm(config) == expected
    on.endpoint = "tcp://router:5557"  # to which vLLM connects
    assert of_vllm(config) is None
    on.enable_kv_cache_events = False
    assert of_tensorrt_llm({"kv_cache_config": SimpleNamespace(kv_events_config=on)}) is None


def test_vllm_publishes_by_itself() -> None:
    with pytest.raises(SluiceError, match="give the setting kv_events_config"):
        load_vllm(EngineConfig(model_path="m", kv_events_endpoint="tcp://*:5557"))
