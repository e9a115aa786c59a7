"""What vLLM has in its prefix cache, as gateways hear of it."""

import asyncio
import json
from pathlib import Path

import pytest

from sluice.engine.blocks import HashChain
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.types import GenerateRequest, SamplingParams
from tests.engine.client.test_attached import Mirror
from tests.vllm.conftest import BLOCK_SIZE, PATIENCE_S, RILL

pytestmark = pytest.mark.vllm


async def test_gateways_hear_of_blocks_under_our_names(vllm_python: str, tmp_path: Path) -> None:
    endpoints = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    settings = {
        "enforce_eager": "true",
        "block_size": str(BLOCK_SIZE),
        "kv_events_config": json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}),
    }
    config = EngineConfig(
        model_path=str(RILL), runtime=Runtime.VLLM, engine_python=vllm_python, dtype="f32", runtime_settings=settings
    )
    client = ProcessEngineClient(config)
    mirror = Mirror(client)
    prompt = list(range(50, 50 + 3 * BLOCK_SIZE + 1))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            for salt in ("", "tenant"):
                asked = GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=params, cache_salt=salt)
                async for _ in client.submit(asked):
                    pass
                while not mirror.hashes >= {*HashChain(salt, client.info.block_size).hashes(prompt, 3)}:
                    await asyncio.sleep(0.05)
            assert client.stats.num_blocks_cached >= 6
    finally:
        await client.stop()
