"""Replicas that other processes have started, here or on other machines."""

from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.membership.members import Member, Membership
from sluice.engine.fleet.router import DEFAULT_ROUTING, RouterSettings
from sluice.engine.fleet.splitting import MIN_TOKENS
from sluice.engine.fleet.waking import WakeSettings


def make_fleet(
    config: EngineConfig,
    membership: Membership,
    *,
    routing: RouterSettings = DEFAULT_ROUTING,
    heartbeat_timeout_s: float = 10.0,
    drain_s: float = 30.0,
    wake: WakeSettings | None = None,
    min_split_tokens: int = MIN_TOKENS,
) -> FleetClient:
    """Make the client of the engines that `membership` names, now and later. `config` is this server's own: limits of
    the queue while no engine can be reached, and the tokenizer. Streams of an engine that is named no more have
    `drain_s` to end there. With `wake` requests are held while it names none; `min_split_tokens` is as in
    `FleetClient`."""

    def make_client(member: Member) -> AttachedEngineClient:
        return AttachedEngineClient(
            config, member.address, curve=member.curve(), heartbeat_timeout_s=heartbeat_timeout_s
        )

    return FleetClient(
        config,
        routing=routing,
        membership=membership,
        make_client=make_client,
        drain_s=drain_s,
        wake=wake,
        min_split_tokens=min_split_tokens,
    )
