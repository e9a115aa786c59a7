"""Response caches of whole servers: one memory for all models, or a Redis that servers share and may lose."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess
from tests.serving.caching.parts import RedisServer
from tests.triton.server import copy_models, serving
from tests.waiting import wait_until

MODEL = "cached_square"


def square(server: ServerProcess, value: float) -> float:
    body = {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP64", "data": [value, 1]}]}
    answer = httpx.post(f"{server.base_url}/v2/models/{MODEL}/infer", json=body).raise_for_status().json()
    return float(answer["outputs"][0]["data"][0])


def metric(server: ServerProcess, name: str) -> float:
    page = httpx.get(f"{server.metrics_url}").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    asyncio.run(server.start())
    yield server
    server.kill()


def test_one_memory_for_all_models(triton: ServerProcess) -> None:
    before = metric(triton, "nv_cache_num_hits_per_model")
    assert [square(triton, 31) for _ in range(3)] == [961] * 3
    assert metric(triton, "nv_cache_num_hits_per_model") == before + 2


def test_a_server_uses_a_redis_and_does_without(tmp_path: Path, redis: RedisServer) -> None:
    """Several gateways share it: tests/serving/caching/test_redis_cache.py."""
    models = copy_models(tmp_path / "models", [MODEL])
    flags = ("--cache-config", "redis,host=127.0.0.1", "--cache-config", f"redis,port={redis.port}")
    with serving(models, tmp_path / "log", *flags) as server:
        wait_until(lambda: square(server, 3) == 9 and metric(server, "nv_cache_num_hits_per_model") > 0)
        redis.kill()
        assert [square(server, float(value)) for value in range(8)] == [float(value) ** 2 for value in range(8)]
        wait_until(lambda: square(server, 3) == 9 and metric(server, "sluice_response_cache_up") == 0)
