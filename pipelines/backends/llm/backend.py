"""The backends `llm`, `tensorrtllm` and `vllm`: an engine of our own behind either's configuration."""

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.client.base import EngineClient
from engine.client.process import ProcessEngineClient
from pipelines.backends.base import Backend, BackendContext, ModelSource, RequestLimits
from pipelines.backends.llm.checkpoint import CheckpointFolder
from pipelines.backends.llm.configuration import bundled_config, completed, declared_inputs, with_engine_parameters
from pipelines.backends.llm.llm_arguments import read_model_yaml
from pipelines.backends.llm.model import NO_LIMITS, LlmModel, OpenRecord
from pipelines.backends.llm.options import unused_options
from pipelines.backends.llm.setup import Setup, set_up
from pipelines.backends.llm.text import LlmText
from pipelines.inference.spec import spec_of

log = logging.getLogger(__name__)


class LlmBackend(Backend):
    """Serves a model of any format that a runtime here can load; each version has an engine process of its own."""

    name = "llm"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return completed(source.config, await asyncio.to_thread(read_model_yaml, source.version_folder))

    async def load(self, source: ModelSource, context: BackendContext) -> LlmModel:
        declared_inputs(spec_of(source.config, source.version))
        setup = await asyncio.to_thread(_set_up, source, context)
        engine = ProcessEngineClient(setup.engine, heartbeat_timeout_s=context.engine_heartbeat_timeout_s)
        starting = asyncio.create_task(engine.start(), name=f"engine-start {source.name}")
        try:
            text = await _load_text(source.name, setup.checkpoint, engine, str(source.version))
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
    tokenizer = Path(engine.config.tokenizer_path or checkpoint)
    text = await _load_text(name, CheckpointFolder(checkpoint, tokenizer), engine, "1")
    await engine_start
    await text.warm_up()
    for note in unused_options(engine.config, engine.info.runtime):
        log.warning("%s", note)
    config = with_engine_parameters(bundled_config(name), engine.info, engine.config)
    return LlmModel(config, text, engine, open_record, heartbeat_timeout_s=heartbeat_timeout_s, limits=limits)


def _set_up(source: ModelSource, context: BackendContext) -> Setup:
    setup = set_up(source, context.engine_config, context.engine_config_on)
    log.info("model '%s' runs on %s: %s", source.name, setup.choice.runtime, setup.choice.reason)
    if setup.notes:
        log.info("model '%s': without effect as written: %s", source.name, "; ".join(setup.notes))
    return setup


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
