"""The loss of an engine's process: what only real processes show. `test_recovery.py` has the rest in virtual time."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig
from tests.engine.client.faulty_engine import MODULE
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.fake_runner import echo
from tests.waiting import PATIENCE_S, until


@asynccontextmanager
async def faulty(
    folder: Path, heartbeat_timeout_s: float = 5.0, **limits: object
) -> AsyncIterator[ProcessEngineClient]:
    config = msgspec.structs.replace(EngineConfig(model_path=str(folder)), **limits)
    client = ProcessEngineClient(config, heartbeat_timeout_s=heartbeat_timeout_s, module=MODULE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


def kill(client: ProcessEngineClient, number: signal.Signals = signal.SIGKILL) -> None:
    assert client.pid is not None
    os.kill(client.pid, number)


async def test_a_stopped_process_is_found_by_its_silence_and_ended(tmp_path: Path) -> None:
    [prompt] = harmless(1, 400)
    async with faulty(tmp_path, heartbeat_timeout_s=1.0) as client:
        stream = client.submit(request(prompt, 400))
        await until(lambda: stream.output_token_ids)
        pid = client.pid
        kill(client, signal.SIGSTOP)
        assert await collect(stream) == echo(prompt, 400)
        assert client.recoveries.num_restarts >= 1
        assert pid is not None and not psutil.pid_exists(pid)


async def test_stopping_during_recovery_leaves_no_process(tmp_path: Path) -> None:
    async with faulty(tmp_path) as client:
        stream = client.submit(request([9], 4000))
        await until(lambda: stream.output_token_ids)
        old = client.pid
        kill(client)
        pid = await until(lambda: client.pid if client.is_restarting and client.pid != old else None)
        await client.stop()
        assert "the engine was stopped" in (await failure_of(stream)).message
        assert not psutil.pid_exists(pid)
