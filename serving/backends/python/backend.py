"""The backend `python`: models written as Triton's `model.py`, which run unmodified."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, BackendContext, ModelFile
from serving.backends.python.batch_queue import WorkerBatchQueue
from serving.backends.python.environments import (
    SERVER_INTERPRETER,
    EnvironmentCache,
    InterpreterLease,
    WorkerLaunch,
    environment_path,
    find_interpreter,
)
from serving.backends.python.frames import CompleteConfig, ConfigCompleted, Initialize, Report
from serving.backends.python.options import PythonOptions, check_parameters, parse_options
from serving.backends.python.process import WorkerMessage, WorkerProcess
from serving.backends.python.services import refuse_request
from serving.backends.python.supervisor import MAX_LOOKAHEAD, SupervisedWorker
from serving.batching.scheduled import ScheduledModel
from serving.config.config_json import config_json, parse_config_json
from serving.host_policy import policy_of
from serving.instance import Instance, Placement, placements_of
from serving.job import Job
from serving.labels import read_labels
from serving.model import Model
from serving.spec import ModelSource
from sluice.gpus import num_gpus


class PythonInstance(Instance):
    """A place for one batch with a worker: it runs that batch, or has it wait in its process for the one before.

    A worker of fast models has several places in use, so that it finds the next batch when it has finished one:
    handing over takes longer than running then.
    """

    def __init__(self, worker: SupervisedWorker, placement: Placement, workers: Sequence[SupervisedWorker]) -> None:
        """`workers` are all of the model, among which the requests are spread."""
        self.name = worker.name
        self.placement = placement
        self._worker = worker
        self._others = [each for each in workers if each is not worker]
        self._is_busy = False

    @property
    def num_starts(self) -> int:  # type: ignore[override]  # the worker counts, for all of its places
        return self._worker.num_starts

    @property
    def is_ready(self) -> bool:
        worker = self._worker
        if not worker.is_ready:
            return False
        return self._is_busy or (worker.num_batches < worker.depth and self._is_least_loaded())

    def _is_least_loaded(self) -> bool:
        load = self._worker.num_batches
        return load == 0 or all(load <= each.num_batches for each in self._others if each.is_ready)

    def execute(self, jobs: list[Job], done: Callable[[], None]) -> None:
        self._is_busy = True

        def finish() -> None:
            self._is_busy = False
            done()

        self._worker.execute(jobs, finish)

    async def close(self) -> None:
        await self._worker.close()


def create_instances(
    workers: Sequence[SupervisedWorker], placements: Sequence[Placement], may_queue: bool
) -> list[PythonInstance]:
    """The places of `workers`, their first ones first. Without `may_queue` each has only that."""
    num_places = 1 + MAX_LOOKAHEAD if may_queue else 1
    placed = list(zip(workers, placements, strict=True))
    return [PythonInstance(worker, placement, workers) for _ in range(num_places) for worker, placement in placed]


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
        environment: InterpreterLease,
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
        self._environments = EnvironmentCache()
        self._options: PythonOptions | None = None

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        options = self._options_of(context)
        environment = await self._environment_of(source, options)
        launch = WorkerLaunch(environment.interpreter, start_timeout_s=options.start_timeout_s)
        process = WorkerProcess(source.name, launch, lambda message: _refuse(message, process))
        command = CompleteConfig(str(source.model_file), config_json(source.config).decode(), source.name)
        try:
            completed = await process.ask(command)
        finally:
            process.kill()
            await process.close(timeout_s=0)
            environment.release()
        assert isinstance(completed, ConfigCompleted)
        return parse_config_json(completed.config_json)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        check_parameters(source.config)
        labels = await asyncio.to_thread(read_labels, source.config, source.folder)
        options = self._options_of(context)
        environment = await self._environment_of(source, options)
        placements = placements_of(source.config, num_gpus())
        launches = [
            WorkerLaunch(environment.interpreter, _cores_of(each, context), options.start_timeout_s)
            for each in placements
        ]
        workers = create_workers(source, placements, launches, context)
        try:
            await _start(workers)
        except BaseException:
            environment.release()
            raise
        instances = create_instances(workers, placements, _may_queue(source.config))
        return PythonModel(source, instances, labels, context, environment)

    def _options_of(self, context: BackendContext) -> PythonOptions:
        """The server's, which are the same for all models."""
        if self._options is None:
            self._options = parse_options(context.backend_options.get(self.name, {}))
        return self._options

    async def _environment_of(self, source: ModelSource, options: PythonOptions) -> InterpreterLease:
        """The model's own, else the server's runtime for models, else the one that the server runs in."""
        path = environment_path(source.config, source.folder) or options.runtime
        if path is None:
            return InterpreterLease(SERVER_INTERPRETER)
        if path == options.runtime and not await asyncio.to_thread(path.is_dir):
            return InterpreterLease(await find_interpreter(path))
        return await self._environments.lease(path)


def _refuse(message: WorkerMessage, process: WorkerProcess) -> None:
    if not isinstance(message, Report):
        refuse_request(
            message, process.connection, "a model cannot ask the server while its configuration is completed"
        )


def create_workers(
    source: ModelSource, placements: Sequence[Placement], launches: Sequence[WorkerLaunch], context: BackendContext
) -> list[SupervisedWorker]:
    """Not started. What a lost one had not begun, any other may do, unless sequences have their state in it."""
    shared = None if source.config.HasField("sequence_batching") else WorkerBatchQueue(source.name)
    return [
        SupervisedWorker(
            _load(source, place), launch, context, WorkerBatchQueue(place.name) if shared is None else shared
        )
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


def _load(source: ModelSource, placement: Placement) -> Initialize:
    """What an instance is started with."""
    return Initialize(
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
