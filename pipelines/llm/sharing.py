"""A loaded LLM that other processes of the server use too: what they need to know, and the model that they make."""

import asyncio
from pathlib import Path

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.client.attached import AttachedEngineClient
from engine.client.interface import Engine
from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig
from engine.fleet.client import FleetClient
from engine.fleet.replica import Replica
from engine.fleet.router import DEFAULT_ROUTING, RouterSettings
from pipelines.llm.model import LlmModel
from pipelines.llm.services import ChatSettings, RequestLimits
from pipelines.llm.text import LlmText
from pipelines.text.stream import OpenRecord


class SharedModel(msgspec.Struct, frozen=True):
    """An LLM that another process serves, with the sockets of its engines. Equal ids mean the same loaded model."""

    id: str
    name: str
    version: str
    checkpoint: str
    tokenizer: str
    chat: ChatSettings
    config: bytes
    """The model's ModelConfig."""
    engine: EngineConfig
    sockets: tuple[str, ...]
    routing: RouterSettings = DEFAULT_ROUTING


def describe_shared(model: LlmModel) -> SharedModel | None:
    """Return what others need to serve the model; None where its engine takes no other clients, or is given up."""
    engine, origin = model.engine, model.text.origin
    sockets = _sockets(engine)
    if not sockets or origin is None or engine.failure is not None:
        return None
    return SharedModel(
        id=sockets[0],
        name=model.name,
        version=model.text.version,
        checkpoint=str(origin.checkpoint),
        tokenizer=str(origin.tokenizer),
        chat=origin.chat,
        config=model.config.SerializeToString(),
        engine=engine.config,
        sockets=sockets,
        routing=engine.routing if isinstance(engine, FleetClient) else DEFAULT_ROUTING,
    )


def _sockets(engine: Engine) -> tuple[str, ...]:
    """Return the sockets of its engines that are not given up; none where one of them takes no other clients."""
    replicas = [each.engine for each in engine.replicas] if isinstance(engine, FleetClient) else [engine]
    clients = [each for each in replicas if each.failure is None]
    found = [each.shared_socket if isinstance(each, ProcessEngineClient) else None for each in clients]
    return tuple(str(each) for each in found if each is not None) if None not in found else ()


async def attach_model(
    shared: SharedModel, open_record: OpenRecord, heartbeat_timeout_s: float, limits: RequestLimits
) -> LlmModel:
    """Make a model over the engine of another process. Raises SluiceError."""
    clients = [
        AttachedEngineClient(shared.engine, Path(socket), heartbeat_timeout_s=heartbeat_timeout_s)
        for socket in shared.sockets
    ]
    engine: Engine = clients[0]
    if len(clients) > 1:
        replicas = [Replica(str(number), client) for number, client in enumerate(clients)]
        engine = FleetClient(shared.engine, replicas, shared.routing)
    starting = asyncio.create_task(engine.start(), name=f"engine-link {shared.name}")
    try:
        text = await asyncio.to_thread(
            LlmText.load,
            shared.name,
            Path(shared.checkpoint),
            engine,
            tokenizer_path=Path(shared.tokenizer),
            version=shared.version,
            open_record=open_record,
            chat=shared.chat,
        )
        await starting
        config = ModelConfig.FromString(shared.config)
        return LlmModel(config, text, engine, heartbeat_timeout_s=heartbeat_timeout_s, limits=limits)
    except BaseException:
        starting.cancel()
        await asyncio.wait((starting,))
        if not starting.cancelled():
            starting.exception()
        await engine.stop()
        raise
