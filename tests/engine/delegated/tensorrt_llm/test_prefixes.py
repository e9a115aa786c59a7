"""Gateways and routers hear what TensorRT-LLM has in its prefix cache: real processes, over the stand-in."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.client.base import Replica
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.fleet.client import FleetClient
from sluice.engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.over_stand_in import StandIn, request, tokens
from tests.engine.fleet.fleets import leading_blocks
from tests.waiting import until

PROMPT = list(range(50, 178))
"""Four blocks of 32 tokens; the last token of a prompt is in none."""
MORE = [*PROMPT, 5]


def streamed(folder: Path) -> dict[str, str]:
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/kv", "replay_endpoint": f"ipc://{folder}/re"}
    return {"kv_cache_config.kv_events_config": json.dumps(events)}


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0 streamed"])
async def test_another_gateway_finds_the_replica_that_has_a_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    number, _, is_streamed = version.partition(" ")
    stand_in = StandIn(monkeypatch, tmp_path, number)
    places = [tmp_path / name for name in ("left", "right")]
    configs = []
    for place in places:
        place.mkdir()
        settings = streamed(place) if is_streamed else {}
        configs.append(
            stand_in.config(runtime_settings=settings, is_replica=True, lora_modules={"fr": str(adapter(tmp_path))})
        )
    pairs = list(zip(configs, places, strict=True))
    owns = [ProcessEngineClient(config, shared_socket=place / "shared") for config, place in pairs]
    others = [AttachedEngineClient(config, place / "shared") for config, place in pairs]
    first, second = (
        FleetClient(configs[0], [Replica(str(place), engine) for place, engine in enumerate(engines)])
        for engines in (owns, others)
    )
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        for fleet in (first, second):
            stack.push_async_callback(fleet.stop)
            await fleet.start()
        for own, asked in zip(owns, (request(MORE, 1), request(MORE, 1, cache_salt="tenant")), strict=True):
            await tokens(own.submit(asked))  # the second gateway does not see it
            await until(lambda asked=asked: sum(leading_blocks(second, asked)) == 4)
        assert has(second, request(MORE)) == [4, 0]
        assert has(second, request(MORE, cache_salt="tenant")) == [0, 4]
        for nobodys in (request(MORE, cache_salt="other"), request(MORE, adapter="fr"), request([7, *MORE])):
            assert has(second, nobodys) == [0, 0]
        stream = second.submit(request(MORE, 1, cache_salt="tenant"))
        assert stream in second.replicas[1].engine.open_streams
        await tokens(stream)
        assert owns[0].stats.num_blocks_cached >= 4


def has(fleet: FleetClient, asked: GenerateRequest) -> list[int]:
    return [*leading_blocks(fleet, asked), 0, 0][:2]


def adapter(folder: Path) -> Path:
    place = folder / "adapter"
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"]}))
    (place / "adapter_model.safetensors").touch()
    return place


async def test_events_go_on_to_routers_in_vllms_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.2.1")
    endpoint = f"ipc://{tmp_path}/events"
    stored: list[dict[str, Any]] = []
    number = 1000
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(endpoint)
        subscriber.subscribe("kv")
        async with stand_in.client(kv_events_endpoint=endpoint, kv_events_topic="kv") as client:
            while not await subscriber.poll(100):  # what comes before a subscriber is known does not reach it
                await tokens(client.submit(request([number := number + 1] * 33, 1)))
            await tokens(client.submit(request(MORE, 1, cache_salt="tenant")))
            while len(stored) < 4:
                _, _, payload = await subscriber.recv_multipart()
                events = msgspec.msgpack.decode(payload)[1]
                stored += [each for each in events if each["type"] == "BlockStored" and each["token_ids"][0] in PROMPT]
    assert [token for each in stored for token in each["token_ids"]] == PROMPT
    assert [each["parent_block_hash"] for each in stored[1:]] == [each["block_hashes"][0] for each in stored[:-1]]
    assert stored[0]["extra_keys"] == [["tenant"]]


@pytest.mark.parametrize("settings", [{"kv_cache_config.event_buffer_max_size": "0"}, {"enable_block_reuse": "false"}])
async def test_events_that_are_off_cannot_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, str]
) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.2.1")
    with pytest.raises(
        SluiceError, match=r"needs KV blocks .* kv_cache_config.event_buffer_max_size above 0"
    ) as caught:
        async with stand_in.client(kv_events_endpoint=f"ipc://{tmp_path}/events", runtime_settings=settings):
            raise AssertionError
    assert caught.value.code is ErrorCode.INVALID
