"""A loaded LLM that other processes of the server use too: what they need to know, and the model that they make."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.client.base import Replica
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import Engine, FleetClient
from sluice.engine.fleet.joining import make_fleet
from sluice.engine.fleet.membership.members import Member, Membership
from sluice.engine.fleet.router import DEFAULT_ROUTING, MIN_SPLIT_TOKENS, RouterSettings
from sluice.engine.fleet.waking import WakeSettings
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.services import ChatSettings, RequestLimits
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.text.stream import OpenRecord

_JOIN_S = 30.0
"""How long engines elsewhere may take to answer; they answer the process that shares them already."""


class SharedModel(msgspec.Struct, frozen=True):
    """An LLM that another process serves, with the places of its engines. Equal ids mean the same loaded model, whose
    members may change."""

    id: str
    name: str
    version: str
    checkpoint: str
    tokenizer: str
    chat: ChatSettings
    config: bytes
    """The model's ModelConfig."""
    engine: EngineConfig
    sockets: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    """Its engines elsewhere, in place of sockets; neither while there are none any more."""
    routing: RouterSettings = DEFAULT_ROUTING
    min_split_tokens: int = MIN_SPLIT_TOKENS


def describe_shared(model: LlmModel) -> SharedModel | None:
    """Return what others need to serve the model; None where its engine takes no other clients, or is given up."""
    engine, origin = model.engine, model.text.origin
    members = engine.members
    sockets = _sockets(engine) if members is None else ()
    if (members is None and not sockets) or origin is None or engine.failure is not None:
        return None
    return SharedModel(
        id=_share_id(model.name, engine, sockets),
        name=model.name,
        version=model.text.version,
        checkpoint=str(origin.checkpoint),
        tokenizer=str(origin.tokenizer),
        chat=origin.chat,
        config=model.config.SerializeToString(),
        engine=engine.config,
        sockets=sockets,
        members=members or (),
        routing=engine.routing or DEFAULT_ROUTING,
        min_split_tokens=MIN_SPLIT_TOKENS if engine.handover is None else engine.handover.min_tokens,
    )


async def _within(starting: "asyncio.Task[None]", limit_s: float) -> None:
    """Wait for the engines. Raises their error, UNAVAILABLE where none can be reached in time."""
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.shield(starting)
    except TimeoutError:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"no engine could be reached within {limit_s:g} s") from None


def _share_id(name: str, engine: Engine, sockets: tuple[str, ...]) -> str:
    """Return the first socket; of engines elsewhere an id of the fleet."""
    return sockets[0] if sockets else f"{name} {id(engine):x}"


def _sockets(engine: Engine) -> tuple[str, ...]:
    """Return the sockets of its engines that are not given up; none where one of them takes no other clients."""
    clients = [each.engine for each in engine.replicas if each.engine.failure is None]
    found = [each.shared_socket if isinstance(each, ProcessEngineClient) else None for each in clients]
    return tuple(str(each) for each in found if each is not None) if None not in found else ()


class AttachSettings(NamedTuple):
    """The settings of one process alone: when an engine counts as hung, how long the streams of one that leaves may go
    on, and how requests are held while there is none."""

    heartbeat_timeout_s: float
    drain_s: float
    wake: WakeSettings | None = None


def _make_client(shared: SharedModel, membership: Membership | None, settings: AttachSettings) -> Engine:
    """Make the client of a model's engines, whose members, where it has any, are those of `membership`."""
    heartbeat_timeout_s = settings.heartbeat_timeout_s
    if membership is not None:
        return make_fleet(
            shared.engine,
            membership,
            routing=shared.routing,
            heartbeat_timeout_s=heartbeat_timeout_s,
            drain_s=settings.drain_s,
            wake=settings.wake,
            min_split_tokens=shared.min_split_tokens,
        )
    clients = [
        AttachedEngineClient(shared.engine, Path(socket), heartbeat_timeout_s=heartbeat_timeout_s)
        for socket in shared.sockets
    ]
    if len(clients) == 1:
        return clients[0]
    replicas = [Replica(str(number), client) for number, client in enumerate(clients)]
    return FleetClient(shared.engine, replicas, shared.routing, min_split_tokens=shared.min_split_tokens)


async def attach_model(
    shared: SharedModel,
    membership: Membership | None,
    open_record: OpenRecord,
    settings: AttachSettings,
    limits: RequestLimits,
) -> LlmModel:
    """Make a model over the engines of another process, or those elsewhere that `membership` names, as another process
    does. Raises SluiceError."""
    engine = _make_client(shared, membership, settings)
    starting = asyncio.create_task(engine.start(), name=f"engine-link {shared.name}")
    try:
        text = await asyncio.to_thread(
            load_text,
            LlmText,
            shared.name,
            Path(shared.checkpoint),
            engine,
            tokenizer_path=Path(shared.tokenizer),
            version=shared.version,
            open_record=open_record,
            chat=shared.chat,
        )
        await _within(starting, _JOIN_S)
        config = ModelConfig.FromString(shared.config)
        return LlmModel(config, text, engine, heartbeat_timeout_s=settings.heartbeat_timeout_s, limits=limits)
    except BaseException:
        starting.cancel()
        await asyncio.wait((starting,))
        if not starting.cancelled():
            starting.exception()
        await engine.stop()
        raise
