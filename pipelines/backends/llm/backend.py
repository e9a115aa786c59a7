"""The backends `llm`, `tensorrtllm` and `vllm`: an engine of our own behind either's configuration."""

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.client.base import EngineClient
from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig
from pipelines.backends.base import Backend, BackendContext, ModelSource, RequestLimits
from pipelines.backends.llm.checkpoint import CheckpointFolder, find_checkpoint, vllm_arguments
from pipelines.backends.llm.configuration import bundled_config, completed, declared_inputs, with_engine_parameters
from pipelines.backends.llm.model import NO_LIMITS, LlmModel, OpenRecord
from pipelines.backends.llm.parameters import apply, texts_of
from pipelines.backends.llm.queueing import unused_rules
from pipelines.backends.llm.text import LlmText
from pipelines.inference.spec import spec_of

log = logging.getLogger(__name__)


class LlmBackend(Backend):
    """Serves a HuggingFace checkpoint or OpenVINO IR; each version has an engine process of its own."""

    name = "llm"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return completed(source.config)

    async def load(self, source: ModelSource, context: BackendContext) -> LlmModel:
        declared_inputs(spec_of(source.config, source.version))
        checkpoint, config = await asyncio.to_thread(_set_up, source, context)
        engine = ProcessEngineClient(config, heartbeat_timeout_s=context.engine_heartbeat_timeout_s)
        starting = asyncio.create_task(engine.start(), name=f"engine-start {source.name}")
        try:
            text = await _load_text(source.name, checkpoint, engine, str(source.version))
            await starting
            await text.warm_up()
            return LlmModel(
                source.config,
                text,
                engine,
                context.open_record,
                heartbeat_timeout_s=context.engine_heartbeat_timeout_s,
                limits=context.request_limits,
            )
        except BaseException:
            await _abandon(starting)
            await engine.stop()
            raise


async def load_checkpoint(
    name: str,
    checkpoint: Path,
    engine: EngineClient,
    engine_start: Awaitable[None],
    open_record: OpenRecord,
    *,
    heartbeat_timeout_s: float = 10.0,
    limits: RequestLimits = NO_LIMITS,
) -> LlmModel:
    """A checkpoint without a model repository as a model, over an engine that its caller starts.

    Begin `engine_start = asyncio.create_task(engine.start())` as early as can be: here the text side loads while the
    engine does, then one token is generated to prove that both work. Raises SluiceError; the engine stays the caller's
    until this returns, and is the model's from then on (`LlmModel.close` stops it).
    """
    text = await _load_text(name, CheckpointFolder(checkpoint, checkpoint), engine, "1")
    await engine_start
    await text.warm_up()
    config = with_engine_parameters(bundled_config(name), engine.info)
    return LlmModel(config, text, engine, open_record, heartbeat_timeout_s=heartbeat_timeout_s, limits=limits)


def _set_up(source: ModelSource, context: BackendContext) -> tuple[CheckpointFolder, EngineConfig]:
    """Where the checkpoint is and how its engine is set up: the model's parameters over the command line's."""
    texts = texts_of(source.config) | vllm_arguments(source.version_folder)
    max_queue_size = source.config.dynamic_batching.default_queue_policy.max_queue_size
    if max_queue_size:
        texts.setdefault("max_queue_size", str(max_queue_size))
    checkpoint = find_checkpoint(source, texts)
    config, notes = apply(context.engine_config(str(checkpoint.path)), source.name, texts)
    notes += unused_rules(source.config)
    if notes:
        log.info("model '%s': without effect as written: %s", source.name, "; ".join(notes))
    return checkpoint, config


async def _load_text(name: str, checkpoint: CheckpointFolder, engine: EngineClient, version: str) -> LlmText:
    def load() -> LlmText:
        return LlmText.load(name, checkpoint.path, engine, tokenizer_path=checkpoint.tokenizer, version=version)

    return await asyncio.to_thread(load)


async def _abandon(starting: "asyncio.Task[None]") -> None:
    """End a start that is under way; an engine that was being loaded is stopped by whoever made it."""
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled():
        starting.exception()
