"""Fleets of real engine processes, whose runner echoes and fails on demand."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig, EngineRole
from engine.fleet.client import FleetClient
from engine.fleet.replica import Replica
from engine.fleet.splitting import MIN_TOKENS
from tests.engine.client.faulty_engine import MODULE
from tests.waiting import PATIENCE_S


@asynccontextmanager
async def fleet(
    folder: Path,
    num_replicas: int = 2,
    heartbeat_timeout_s: float = 10.0,
    module: str = MODULE,
    num_prefill: int = 0,
    min_split_tokens: int = MIN_TOKENS,
    **limits: object,
) -> AsyncIterator[FleetClient]:
    config = msgspec.structs.replace(EngineConfig(model_path=str(folder)), **limits)
    prefill = msgspec.structs.replace(config, role=EngineRole.PREFILL)
    configs = [*[prefill] * num_prefill, *[config] * (num_replicas - num_prefill)]
    engines = [ProcessEngineClient(c, heartbeat_timeout_s=heartbeat_timeout_s, module=module) for c in configs]
    replicas = [Replica(str(number), engine) for number, engine in enumerate(engines)]
    client = FleetClient(config, replicas, min_split_tokens=min_split_tokens)
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
