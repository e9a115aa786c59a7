"""Replicas on this machine, which share its cores, memory and GPUs."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from sluice.engine.client.base import Replica
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, EngineRole, Runtime
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.router import DEFAULT_ROUTING, MIN_SPLIT_TOKENS, RouterSettings
from sluice.engine.runtimes import choose_runtime
from sluice.errors import invalid
from sluice.machine import num_cores, visible_gpus


def make_engine(
    config: EngineConfig,
    num_replicas: int,
    *,
    num_prefill: int = 0,
    min_split_tokens: int = MIN_SPLIT_TOKENS,
    routing: RouterSettings = DEFAULT_ROUTING,
    heartbeat_timeout_s: float = 10.0,
    choose_socket: Callable[[], Path | None] = lambda: None,
) -> ProcessEngineClient | FleetClient:
    """Make the client of one engine process, or of several as one, which have not started. `routing` says how
    one of several is chosen, of which the first `num_prefill` compute prompts for the others (`min_split_tokens` as in
    `FleetClient`). `choose_socket` returns where other processes attach to the next engine. Raises INVALID where the
    GPUs do not suffice, or no replica is left to generate."""
    if num_prefill >= num_replicas:
        message = f"prefill_replicas must be fewer than replicas, got {num_prefill} of {num_replicas}"
        raise invalid("prefill_replicas", message)
    config = msgspec.structs.replace(config, is_replica=num_replicas > 1, has_prefill_replicas=num_prefill > 0)
    configs = split_config(config, num_replicas)
    for number in range(num_prefill):
        configs[number] = msgspec.structs.replace(configs[number], role=EngineRole.PREFILL)
    engines = [
        ProcessEngineClient(each, heartbeat_timeout_s=heartbeat_timeout_s, shared_socket=choose_socket())
        for each in configs
    ]
    if len(engines) == 1:
        return engines[0]
    replicas = [Replica(str(number), engine) for number, engine in enumerate(engines)]
    return FleetClient(config, replicas, routing, min_split_tokens=min_split_tokens)


def split_config(config: EngineConfig, num_replicas: int) -> list[EngineConfig]:
    """Return the configuration of each replica. On GPUs each has devices of its own. On the CPU they share the cores
    and the memory of KV caches; a number of threads or of blocks that was given is each replica's."""
    if num_replicas == 1:
        return [config]
    gpus = visible_gpus()
    if gpus and config.device != "cpu" and choose_runtime(config).runtime is not Runtime.OPENVINO:
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
