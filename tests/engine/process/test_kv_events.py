"""Events of the prefix cache, read with the structs and sockets that a subscriber of vLLM has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sluice.engine.blocks import BlockHash, HashChain
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.process.kv_events import KvEventPublisher
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.faulty_engine import MODULE
from tests.engine.client.test_recovery import collect, harmless, request
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import ScriptedExecutor

PATIENCE_MS = 30_000


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As in vLLM 0.32's `vllm/distributed/kv_events.py`, with the numbers that it writes there by default."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def numbers(hashes: list[BlockHash]) -> list[int]:
    """The hashes as vLLM writes them by default (`maybe_convert_block_hash`): their last 64 bits."""
    return [int.from_bytes(each, "big") & (1 << 64) - 1 for each in hashes]


class Subscriber:
    """A router's end: follows the events, and asks for those that it has missed."""

    def __init__(self, folder: Path, topic: str) -> None:
        self._context = zmq.Context()
        self._events, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._events.subscribe(topic)
        self._events.connect(f"ipc://{folder}/events")
        self._replay.connect(f"ipc://{folder}/replay")

    def read(self) -> tuple[bytes, int, KVEventBatch]:
        assert self._events.poll(PATIENCE_MS)
        topic, number, payload = self._events.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)

    def has_news(self) -> bool:
        return bool(self._events.poll(0))

    def ask(self, first: int) -> None:
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))

    def replayed(self) -> list[tuple[int, KVEventBatch]]:
        """Return the batches up to the mark at the end."""
        batches: list[tuple[int, KVEventBatch]] = []
        while True:
            assert self._replay.poll(PATIENCE_MS)
            empty, _, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)))

    def close(self) -> None:
        self._events.close(0)
        self._replay.close(0)
        self._context.term()


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    made = Subscriber(tmp_path, "kv@")
    yield made
    made.close()


def configuration(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        kv_events_endpoint=f"ipc://{folder}/events",
        kv_events_replay_endpoint=f"ipc://{folder}/replay",
        kv_events_topic="kv@here@echo",
        **fields,
    )


def publish_until_asked(publisher: KvEventPublisher, subscriber: Subscriber, first: int) -> list[tuple[int, Any]]:
    """Return what the publisher answers to a question that is on its way."""
    subscriber.ask(first)
    replay = publisher._replay
    assert replay is not None
    assert replay.poll(PATIENCE_MS)
    publisher.publish()
    return subscriber.replayed()


def test_blocks_come_with_their_tokens_and_go_with_their_hashes(tmp_path: Path, subscriber: Subscriber) -> None:
    publisher = KvEventPublisher(configuration(tmp_path), 4)
    try:
        engine = ScriptedExecutor(EchoRunner(num_blocks=6, block_size=4, max_model_len=24))
        engine.executor.kv.observe(publisher.on_stored, publisher.on_removed)
        publisher.publish()
        first, second = list(range(1, 11)), list(range(101, 122))
        for stream_id, prompt in enumerate((first, second, second)):
            engine.submit(stream_id, prompt, max_tokens=2, cache_salt="s" if stream_id else "")
            engine.finish()
            publisher.publish()
        batches = publish_until_asked(publisher, subscriber, 1)
        assert publish_until_asked(publisher, subscriber, 2) == batches[1:]
    finally:
        publisher.close()
    assert [number for number, _ in batches] == [1, 2], "the third prompt was in the cache, which stayed as it was"
    before, after = numbers(HashChain("", 4).hashes(first, 2)), numbers(HashChain("s", 4).hashes(second, 5))
    events = [event for _, batch in batches for event in batch.events]
    assert events[0] == BlockStored(before, None, first[:8], 4, None, "GPU", None)
    stored = [event for event in events[1:] if isinstance(event, BlockStored)]
    assert [block for event in stored for block in event.block_hashes] == after
    assert [token for event in stored for token in event.token_ids] == second[:20]
    assert [event.parent_block_hash for event in stored] == [None, *(event.block_hashes[-1] for event in stored[:-1])]
    assert stored[0].extra_keys == [("s",), *[None] * (len(stored[0].block_hashes) - 1)]
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved([before[1], before[0]], "GPU")]


async def test_an_engine_publishes_what_a_router_of_vllm_reads(tmp_path: Path, subscriber: Subscriber) -> None:
    prompts = harmless(200, 70)
    launcher = ProcessEngineClient(configuration(tmp_path), module=MODULE)
    try:
        await launcher.start()
        assert await collect(launcher.submit(request(prompts[0], 70))) == echo(prompts[0], 70)
        subscriber.ask(0)
        [(_, begin), *batches] = subscriber.replayed()
        num_more = 0
        while not subscriber.has_news():  # its connection may be later than the first batches
            num_more += 1
            await collect(launcher.submit(request(prompts[num_more], 70)))
        topic, number, batch = subscriber.read()
        subscriber.ask(number)
        assert subscriber.replayed()[0] == (number, batch)
        assert topic == b"kv@here@echo"
    finally:
        await launcher.stop()
    assert begin.data_parallel_rank == 0
    assert isinstance(begin.events[0], AllBlocksCleared)
    assert [number for number, _ in batches] == [1, 2]
    tokens = prompts[0] + echo(prompts[0], 70)
    one, two = numbers(HashChain("", 32).hashes(tokens, 2))
    assert [batch.events for _, batch in batches] == [
        [BlockStored([one], None, tokens[:32], 32, None, "GPU", None)],
        [BlockStored([two], one, tokens[32:64], 32, None, "GPU", None)],
    ]


def test_an_endpoint_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    config = configuration(tmp_path / "nowhere")
    with pytest.raises(SluiceError, match=r"kv_events_endpoint ipc://.* cannot be used") as caught:
        KvEventPublisher(config, 4)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(SluiceError, match="kv_events_replay_endpoint needs kv_events_endpoint"):
        EngineConfig(model_path="", kv_events_replay_endpoint="tcp://*:1")
