"""The backends `llm`, `tensorrtllm` and `vllm`, which all serve an LLM in an engine process of its own."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import ClassVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.fleet.client import Engine
from sluice.engine.fleet.local import make_engine
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.configuration import (
    add_engine_parameters,
    complete_config,
    declared_inputs,
    default_llm_config,
)
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.model_folder import MODEL_YAML, CheckpointFolder, read_model_yaml
from sluice.pipelines.llm.services import DEFAULT_CHAT, NO_LIMITS, ChatSettings, LlmServices, RequestLimits
from sluice.pipelines.llm.setup import Setup, ignored_options, set_up
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text, read_text_files
from sluice.pipelines.text.stream import OpenRecord
from sluice.serving.backend import Backend, BackendContext, RuntimeReport
from sluice.serving.config.validation import complete_and_check
from sluice.serving.findings import invalid_field
from sluice.serving.spec import ModelSource, build_spec

log = logging.getLogger(__name__)

_CHECKPOINT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "openvino_model.xml")


class LlmBackend(Backend):
    """Serves an LLM in any format that a runtime here can load. Each version has engine processes of its own, as many
    as its instance groups count."""

    name = "llm"
    detection_order = 70
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "sequence_batching": "an engine batches in flight and keeps no sequences",
        "instance_group.rate_limiter": "an engine plans its steps itself",
        "instance_group.passive": "it has no instances",
        "response_cache": "every request is computed",
    }

    def __init__(self, services: LlmServices | None = None) -> None:
        """Take the server's services. Without them engines have their defaults and requests are not measured."""
        self._services = services or LlmServices()

    def recognizes(self, version_folder: Path) -> bool:
        """Whether the folder holds an LLM as checkpoint, OpenVINO IR or compiled engine, or arguments that name one."""
        if any(version_folder.glob("*.engine")) or (version_folder / MODEL_YAML).is_file():
            return True
        has_weights = any(any(version_folder.glob(each)) for each in _CHECKPOINT_PATTERNS)
        return has_weights and (version_folder / "config.json").is_file()

    def check(self, source: ModelSource) -> RuntimeReport:
        """Check everything that a load reads of the model, but its weights."""
        config = complete_and_check(complete_config(source.config, read_model_yaml(source.version_folder)))
        try:
            setup = _read_setup(ModelSource(source.folder, source.version, config), self._services)
            read_text_files(
                setup.checkpoint.path, setup.checkpoint.tokenizer, self._services.chat.with_parameters(setup.texts)
            )
        except SluiceError as error:
            if error.param is None or error.param not in source.config.parameters:
                raise
            raise invalid_field(error.message, f'parameters["{error.param}"]') from None
        # The engine's process finds the same when it opens the folder.
        if problem := setup.choice.spec.find_problem(setup.checkpoint.path):
            raise SluiceError(ErrorCode.INVALID, problem)
        noted = {note.partition(":")[0] for note in setup.notes}
        obeyed = tuple(sorted(setup.texts.keys() - noted))
        return RuntimeReport(setup.choice.runtime.value, setup.choice.reason, obeyed, tuple(setup.notes))

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_config(source.config, await asyncio.to_thread(read_model_yaml, source.version_folder))

    async def load(self, source: ModelSource, context: BackendContext) -> LlmModel:
        services = self._services
        if not services.starts_engines:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"model '{source.name}' has its engine in another process")
        setup = await asyncio.to_thread(_set_up, source, services)
        engine = make_engine(
            setup.engine,
            setup.num_replicas,
            routing=services.routing,
            heartbeat_timeout_s=services.heartbeat_timeout_s,
            choose_socket=services.choose_socket,
        )
        starting = asyncio.create_task(engine.start(), name=f"engine-start {source.name}")
        try:
            text = await _load_text(
                source.name,
                setup.checkpoint,
                engine,
                services.open_record,
                str(source.version),
                chat=services.chat.with_parameters(setup.texts),
            )
            await starting
            await text.warm_up()
            return LlmModel(
                source.config, text, engine, heartbeat_timeout_s=services.heartbeat_timeout_s, limits=services.limits
            )
        except BaseException:
            await _abandon(starting)
            await engine.stop()
            raise


async def load_checkpoint(
    name: str,
    checkpoint: Path,
    engine: Engine,
    engine_start: Awaitable[None],
    open_record: OpenRecord,
    *,
    heartbeat_timeout_s: float = 10.0,
    limits: RequestLimits = NO_LIMITS,
    chat: ChatSettings = DEFAULT_CHAT,
) -> LlmModel:
    """Load a checkpoint without a model repository as a model, over an engine that the caller starts.

    Begin `engine_start = asyncio.create_task(engine.start())` as early as possible: the tokenizer loads here while
    the engine does, then one token is generated to prove that both work. Raises SluiceError. The caller owns the
    engine until this returns; then the model does (`LlmModel.close` stops it).
    """
    tokenizer = Path(engine.config.tokenizer_path or checkpoint)
    folder = CheckpointFolder(checkpoint, tokenizer)
    text = await _load_text(name, folder, engine, open_record, chat=chat)
    await engine_start
    if engine.is_asleep:
        return LlmModel(default_llm_config(name), text, engine, heartbeat_timeout_s=heartbeat_timeout_s, limits=limits)
    await text.warm_up()
    for note in ignored_options(engine.config, engine.info.runtime):
        log.warning("%s", note)
    config = add_engine_parameters(default_llm_config(name), engine.info, engine.config)
    return LlmModel(config, text, engine, heartbeat_timeout_s=heartbeat_timeout_s, limits=limits)


def _read_setup(source: ModelSource, services: LlmServices) -> Setup:
    """Decide how a version with a complete configuration is served. Raises as `declared_inputs` and `set_up`."""
    declared_inputs(build_spec(source.config, source.version))
    return set_up(source, services.engine_config)


def _set_up(source: ModelSource, services: LlmServices) -> Setup:
    setup = _read_setup(source, services)
    log.info("model '%s' runs on %s: %s", source.name, setup.choice.runtime, setup.choice.reason)
    if setup.notes:
        log.info("model '%s': without effect as written: %s", source.name, "; ".join(setup.notes))
    return setup


async def _load_text(
    name: str,
    checkpoint: CheckpointFolder,
    engine: Engine,
    open_record: OpenRecord,
    version: str = "1",
    *,
    chat: ChatSettings,
) -> LlmText:
    return await asyncio.to_thread(
        load_text,
        LlmText,
        name,
        checkpoint.path,
        engine,
        tokenizer_path=checkpoint.tokenizer,
        version=version,
        open_record=open_record,
        chat=chat,
    )


async def _abandon(starting: "asyncio.Task[None]") -> None:
    """Cancel a start that is under way. The caller stops the engine itself."""
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled():
        starting.exception()
