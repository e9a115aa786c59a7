"""Fleets of real engine processes, whose runner echoes and fails on demand."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig
from engine.fleet.client import FleetClient
from engine.fleet.replica import Replica
from tests.engine.client.test_recovery import MODULE

PATIENCE_S = 90.0


@asynccontextmanager
async def fleet(
    folder: Path, num_replicas: int = 2, heartbeat_timeout_s: float = 10.0, module: str = MODULE, **limits: object
) -> AsyncIterator[FleetClient]:
    config = msgspec.structs.replace(EngineConfig(model_path=str(folder)), **limits)
    engines = [
        ProcessEngineClient(config, heartbeat_timeout_s=heartbeat_timeout_s, module=module) for _ in range(num_replicas)
    ]
    client = FleetClient(config, [Replica(str(number), engine) for number, engine in enumerate(engines)])
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


def kill(replica: Replica, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the process of a replica."""
    [pid] = replica.engine.pids
    os.kill(pid, number)


def kill_first(client: FleetClient, number: signal.Signals = signal.SIGKILL) -> None:
    kill(client.replicas[0], number)
