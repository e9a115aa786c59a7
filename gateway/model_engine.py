"""Makes the engine of MODEL, which a command line names, from the options."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.engine.fleet.joining import make_fleet
from sluice.engine.fleet.local import make_engine
from sluice.gateway.options.config import ServeConfig

if TYPE_CHECKING:
    from sluice.engine.fleet.client import Engine


def make_model_engine(
    config: ServeConfig, checkpoint: Path, choose_socket: Callable[[], Path | None] = lambda: None
) -> "Engine":
    """Make the engine of MODEL, or its replicas, which have not started. `choose_socket` returns where workers attach
    to the next one. Raises SluiceError where the machine has too few GPUs."""
    if config.fleet.engines is not None:
        return make_fleet(
            config.engine(str(checkpoint)),
            config.fleet.membership(),
            routing=config.fleet.routing(),
            heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s,
            drain_s=config.shutdown.exit_timeout_s,
            wake=config.fleet.wake(),
            min_split_tokens=config.fleet.prefill_min_tokens,
        )
    return make_engine(
        config.engine(str(checkpoint)),
        config.fleet.num_replicas,
        num_prefill=config.fleet.num_prefill_replicas,
        min_split_tokens=config.fleet.prefill_min_tokens,
        routing=config.fleet.routing(),
        heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s,
        choose_socket=choose_socket,
    )
