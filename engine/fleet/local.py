"""Replicas on this machine, which share its cores, memory and GPUs."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig, Runtime
from engine.fleet.client import FleetClient
from engine.fleet.replica import Replica
from engine.fleet.router import DEFAULT_ROUTING, RouterSettings
from engine.runtimes import choose_runtime
from sluice.errors import invalid
from sluice.machine import num_cores, visible_gpus


def make_engine(
    config: EngineConfig,
    num_replicas: int,
    *,
    routing: RouterSettings = DEFAULT_ROUTING,
    heartbeat_timeout_s: float = 10.0,
    choose_socket: Callable[[], Path | None] = lambda: None,
) -> ProcessEngineClient | FleetClient:
    """Make the client of one engine process, or of several as one, which have not started. `routing` says how
    one of several is chosen. `choose_socket` returns where other processes attach to the next engine. Raises INVALID
    where the GPUs do not suffice."""
    engines = [
        ProcessEngineClient(each, heartbeat_timeout_s=heartbeat_timeout_s, shared_socket=choose_socket())
        for each in split_config(config, num_replicas)
    ]
    if len(engines) == 1:
        return engines[0]
    return FleetClient(config, [Replica(str(number), engine) for number, engine in enumerate(engines)], routing)


def split_config(config: EngineConfig, num_replicas: int) -> list[EngineConfig]:
    """Return the configuration of each replica. On GPUs each has devices of its own. On the CPU they share the cores
    and the memory of KV caches; a number of threads or of blocks that was given is each replica's."""
    if num_replicas == 1:
        return [config]
    gpus = visible_gpus()
    if gpus and choose_runtime(config).runtime is not Runtime.OPENVINO:
        return _split_gpus(config, num_replicas, gpus)
    size = config.kv_cache_memory_bytes
    share = msgspec.structs.replace(
        config,
        num_threads=config.num_threads or max(1, num_cores() // num_replicas),
        kv_cache_memory_bytes=None if size is None else size // num_replicas,
        memory_share=config.memory_share / num_replicas,
    )
    return [share] * num_replicas


def _split_gpus(config: EngineConfig, num_replicas: int, gpus: tuple[str, ...]) -> list[EngineConfig]:
    num_each = config.tensor_parallel_size * config.pipeline_parallel_size
    if num_replicas * num_each > len(gpus):
        message = (
            f"{num_replicas} replicas of {num_each} GPUs need {num_replicas * num_each}, and there are {len(gpus)}"
        )
        raise invalid("replicas", message)
    parts = [gpus[number * num_each : (number + 1) * num_each] for number in range(num_replicas)]
    return [
        msgspec.structs.replace(config, launcher=["env", f"CUDA_VISIBLE_DEVICES={','.join(part)}", *config.launcher])
        for part in parts
    ]
