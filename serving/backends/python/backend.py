"""The backend `python`: models written as Triton's `model.py`, which run unmodified."""

import asyncio
from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, BackendContext, ModelFile
from serving.backends.python.environments import Environments, Lease, environment_path
from serving.backends.python.frames import Complete, Completed, Load, Report
from serving.backends.python.held import HeldBatches
from serving.backends.python.instance import PythonInstance, instances_of
from serving.backends.python.interpreters import interpreter_at
from serving.backends.python.launch import OWN, Launch
from serving.backends.python.options import PythonOptions, check_parameters, options_of
from serving.backends.python.process import WorkerMessage, WorkerProcess
from serving.backends.python.services import refuse
from serving.backends.python.supervisor import SupervisedWorker
from serving.batching.scheduled import ScheduledModel
from serving.config.config_json import config_json, parse_config_json
from serving.host_policy import policy_of
from serving.instance import Placement, placements_of
from serving.labels import read_labels
from serving.model import Model
from serving.spec import ModelSource
from sluice.machine import num_gpus


class PythonModel(ScheduledModel):
    """Its workers run in an environment that must stay for as long as they do."""

    _counts_responses = False
    """Triton's Python backend keeps no statistics of single responses, and its clients expect none."""

    def __init__(
        self,
        source: ModelSource,
        instances: Sequence[PythonInstance],
        labels: Mapping[str, Sequence[str]],
        context: BackendContext,
        environment: Lease,
    ) -> None:
        super().__init__(source, instances, labels, context)
        self._environment = environment

    async def close(self) -> None:
        await super().close()
        self._environment.release()


class PythonBackend(Backend):
    """Each instance is a worker process; so is, for a moment, the completion of a configuration."""

    name = "python"
    model_files: tuple[ModelFile, ...] = (ModelFile("model.py"),)
    detection_order = 60
    supported_fields = frozenset({"instance_group.gpus", "instance_group.host_policy"})
    default_model_filename = "model.py"

    def __init__(self) -> None:
        self._environments = Environments()
        self._options: PythonOptions | None = None

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        options = self._options_of(context)
        environment = await self._environment_of(source, options)
        launch = Launch(environment.interpreter, start_timeout_s=options.start_timeout_s)
        process = WorkerProcess(source.name, launch, lambda message: _refuse(message, process))
        command = Complete(str(source.model_file), config_json(source.config).decode(), source.name)
        try:
            completed = await process.ask(command)
        finally:
            process.kill()
            await process.close(timeout_s=0)
            environment.release()
        assert isinstance(completed, Completed)
        return parse_config_json(completed.config_json)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        check_parameters(source.config)
        labels = await asyncio.to_thread(read_labels, source.config, source.folder)
        options = self._options_of(context)
        environment = await self._environment_of(source, options)
        placements = placements_of(source.config, num_gpus())
        launches = [
            Launch(environment.interpreter, _cores_of(each, context), options.start_timeout_s) for each in placements
        ]
        workers = workers_of(source, placements, launches, context)
        try:
            await _start(workers)
        except BaseException:
            environment.release()
            raise
        instances = instances_of(workers, placements, _may_queue(source.config))
        return PythonModel(source, instances, labels, context, environment)

    def _options_of(self, context: BackendContext) -> PythonOptions:
        """The server's, which are the same for all models."""
        if self._options is None:
            self._options = options_of(context.backend_options.get(self.name, {}))
        return self._options

    async def _environment_of(self, source: ModelSource, options: PythonOptions) -> Lease:
        """The model's own, else the server's runtime for models, else the one that the server runs in."""
        path = environment_path(source.config, source.folder) or options.runtime
        if path is None:
            return Lease(OWN)
        if path == options.runtime and not await asyncio.to_thread(path.is_dir):
            return Lease(await interpreter_at(path))
        return await self._environments.lease(path)


def _refuse(message: WorkerMessage, process: WorkerProcess) -> None:
    if not isinstance(message, Report):
        refuse(message, process.connection, "a model cannot ask the server while its configuration is completed")


def workers_of(
    source: ModelSource, placements: Sequence[Placement], launches: Sequence[Launch], context: BackendContext
) -> list[SupervisedWorker]:
    """Not started. What a lost one had not begun, any other may do, unless sequences have their state in it."""
    shared = None if source.config.HasField("sequence_batching") else HeldBatches(source.name)
    return [
        SupervisedWorker(_load(source, place), launch, context, HeldBatches(place.name) if shared is None else shared)
        for place, launch in zip(placements, launches, strict=True)
    ]


def _cores_of(placement: Placement, context: BackendContext) -> frozenset[int]:
    policy = policy_of(placement, context.host_policies)
    return policy.cores if policy is not None else frozenset()


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
