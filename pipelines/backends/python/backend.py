"""The backend `python`: models written as Triton's `model.py`, which run unmodified."""

import asyncio
import logging

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import Backend, BackendContext, ModelSource
from pipelines.backends.devices import num_gpus
from pipelines.backends.labels import read_labels
from pipelines.backends.placement import Placement, placements_of
from pipelines.backends.python.frames import Complete, Completed, Load
from pipelines.backends.python.instance import instances_of
from pipelines.backends.python.process import WorkerProcess
from pipelines.backends.python.supervisor import SupervisedWorker
from pipelines.batching.scheduled import ScheduledModel
from pipelines.inference.model import Model
from pipelines.repository.config_json import config_json, parse_config_json

log = logging.getLogger(__name__)

ENVIRONMENT_PARAMETER = "EXECUTION_ENV_PATH"


class PythonBackend(Backend):
    """Each instance is a worker process; so is, for a moment, the completion of a configuration."""

    name = "python"
    default_model_filename = "model.py"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        process = WorkerProcess(source.name, lambda _: None)
        command = Complete(str(source.model_file), config_json(source.config).decode(), source.name)
        try:
            completed = await process.ask(command)
        finally:
            process.kill()
            await process.close(timeout_s=0)
        assert isinstance(completed, Completed)
        return parse_config_json(completed.config_json)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        if ENVIRONMENT_PARAMETER in source.config.parameters:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"parameter {ENVIRONMENT_PARAMETER} is not supported: models run in the server's own environment",
            )
        for option in context.backend_options.get(self.name, {}):
            log.warning("--backend-config=python,%s has no effect", option)
        labels = await asyncio.to_thread(read_labels, source.config, source.folder)
        placements = placements_of(source.config, num_gpus())
        workers = [SupervisedWorker(each.name, _load(source, each), context.models) for each in placements]
        await _start(workers)
        instances = instances_of(workers, placements, _may_queue(source.config))
        return ScheduledModel(source, instances, labels, context)


async def _start(workers: list[SupervisedWorker]) -> None:
    """All of them, at the same time, or none: then the first error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.start())
    except BaseException as error:
        await asyncio.gather(*(worker.close() for worker in workers))
        raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None


def _may_queue(config: ModelConfig) -> bool:
    """Whether batches may be given to a worker ahead: not where a batch could grow, or be another one's, meanwhile."""
    return not config.HasField("dynamic_batching") and not config.HasField("sequence_batching")


def _load(source: ModelSource, placement: Placement) -> Load:
    """What an instance is started with."""
    return Load(
        str(source.model_file),
        {
            "model_config": config_json(source.config).decode(),
            "model_instance_kind": placement.kind,
            "model_instance_name": placement.name,
            "model_instance_device_id": str(placement.gpu or 0),
            "model_repository": str(source.folder),
            "model_version": str(source.version),
            "model_name": source.name,
        },
    )
