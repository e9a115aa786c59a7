"""The backend `python`: loads models written as Triton's `model.py`, which run unmodified in worker processes."""

import asyncio
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid_argument
from sluice.machine import num_gpus
from sluice.serving.backend import Backend, BackendContext, ModelFile
from sluice.serving.backends.python.batch_queue import WorkerBatchQueue
from sluice.serving.backends.python.environments import (
    SERVER_INTERPRETER,
    WORKER_PACKAGES,
    EnvironmentCache,
    InterpreterLease,
    WorkerLaunch,
    check_environment,
    environment_path,
    find_interpreter,
    find_modules,
)
from sluice.serving.backends.python.frames import CompleteConfig, ConfigCompleted, Initialize, WorkerReport
from sluice.serving.backends.python.imports import find_in_server, import_findings
from sluice.serving.backends.python.options import PythonOptions, check_parameters, parse_options
from sluice.serving.backends.python.process import PythonWorkerProcess, WorkerMessage
from sluice.serving.backends.python.services import refuse_request
from sluice.serving.backends.python.supervisor import MAX_LOOKAHEAD, SupervisedWorker
from sluice.serving.batching.scheduled_model import InstanceStarter, ScheduledModel
from sluice.serving.config.config_json import config_json, parse_config_json
from sluice.serving.findings import Finding, InvalidConfig
from sluice.serving.instance import Instance, Placement, choose_host_policy, place_instances
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource, read_labels

_PACKED_ENVIRONMENT = "pb_exec_env_model.py.tar.gz"


class PythonInstance(Instance):
    """Place for one batch at a worker: the batch runs, or waits in the worker's process for the one before it.

    A worker of fast models has several places in use, because handing over a batch takes longer than running it.
    """

    def __init__(self, worker: SupervisedWorker, placement: Placement, workers: Sequence[SupervisedWorker]) -> None:
        """`workers` are all workers of the model, over which requests are spread; they may change."""
        self.name = worker.name
        self.placement = placement
        self._worker = worker
        self._workers = workers
        self._is_busy = False

    @property
    def num_starts(self) -> int:  # type: ignore[override]  # counted by the worker, for all of its places
        return self._worker.num_starts

    @property
    def is_idle(self) -> bool:
        return self._worker.is_idle

    @property
    def is_ready(self) -> bool:
        worker = self._worker
        if not worker.is_ready:
            return False
        return self._is_busy or (worker.num_batches < worker.depth and self._is_least_loaded())

    def _is_least_loaded(self) -> bool:
        load = self._worker.num_batches
        return load == 0 or all(load <= each.num_batches for each in self._workers if each.is_ready)

    @property
    def wants_first(self) -> bool:
        return self._worker.num_batches == 0 and self._worker.is_quick

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self._is_busy = True

        def finish() -> None:
            self._is_busy = False
            done()

        self._worker.execute(jobs, finish)

    async def close(self) -> None:
        await self._worker.close()


def create_instances(
    workers: Sequence[SupervisedWorker],
    placements: Sequence[Placement],
    all_workers: Sequence[SupervisedWorker],
    can_queue_ahead: bool,
) -> list[PythonInstance]:
    """Return the places of `workers`, of which the model has `all_workers`, each worker's first one first.

    Without `can_queue_ahead` each has only one.
    """
    num_places = 1 + MAX_LOOKAHEAD if can_queue_ahead else 1
    placed = list(zip(workers, placements, strict=True))
    return [PythonInstance(worker, placement, all_workers) for _ in range(num_places) for worker, placement in placed]


class PythonModel(ScheduledModel):
    """A loaded Python model. It keeps the environment of its workers in place for as long as they run."""

    _counts_responses = False
    """Whether single responses are counted: Triton's Python backend does not, and its clients expect no such counts."""

    def __init__(
        self,
        source: ModelSource,
        instances: Sequence[PythonInstance],
        labels: Mapping[str, Sequence[str]],
        context: BackendContext,
        environment: InterpreterLease,
        starter: InstanceStarter,
    ) -> None:
        super().__init__(source, instances, labels, context, starter)
        self._environment = environment

    async def close(self) -> None:
        await super().close()
        self._environment.release()


class PythonBackend(Backend):
    """Loads Python models. Each instance is a worker process; completing a configuration starts one for a moment."""

    name = "python"
    model_files: tuple[ModelFile, ...] = (ModelFile("model.py"),)
    detection_order = 60
    supported_fields = frozenset({"instance_group.gpus", "instance_group.host_policy"})
    default_model_filename = "model.py"
    _environment: Path | None = None
    """The environment of models that bring none."""

    def __init__(self) -> None:
        self._environments = EnvironmentCache()
        self._options: PythonOptions | None = None

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        options = self._parse_options(context)
        environment = await self._lease_environment(source, options)
        launch = WorkerLaunch(environment.interpreter, start_timeout_s=options.start_timeout_s)
        process = PythonWorkerProcess(source.name, launch, lambda message: _refuse_services(message, process))
        script, folder = self._script(source)
        command = CompleteConfig(script, config_json(source.config).decode(), source.name, folder)
        try:
            completed = await process.run(command)
        finally:
            process.kill()
            await process.close(timeout_s=0)
            environment.release()
        assert isinstance(completed, ConfigCompleted)
        return parse_config_json(completed.config_json)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        check_parameters(source.config)
        labels = await asyncio.to_thread(read_labels, source.config, source.folder)
        options = self._parse_options(context)
        environment = await self._lease_environment(source, options)
        queue = WorkerBatchQueue(source.name)
        workers: list[SupervisedWorker] = []

        async def start(source: ModelSource, placements: Sequence[Placement]) -> list[PythonInstance]:
            launches = [
                WorkerLaunch(environment.interpreter, _find_cores(each, context), options.start_timeout_s)
                for each in placements
            ]
            started = create_workers(source, placements, launches, context, self._script(source), queue)
            await _start_all(started)
            workers[:] = [*(each for each in workers if not each.is_closing), *started]
            return create_instances(started, placements, workers, _can_queue_ahead(source.config))

        starter = InstanceStarter(num_gpus(), start)
        try:
            instances = await start(source, place_instances(source.config, starter.num_gpus))
        except BaseException:
            environment.release()
            raise
        return PythonModel(source, instances, labels, context, environment, starter)

    def check(self, source: ModelSource) -> None:
        """Check the parameters, the environment and its imports, and compile the model's code without running it."""
        check_parameters(source.config)
        errors, _ = self._import_findings(source)
        script, _ = self._script(source)
        if environment_path(source.config, source.folder) is None and Path(script).is_file():
            _compile(Path(script))
        if errors:
            raise InvalidConfig(errors)

    def file_findings(self, source: ModelSource) -> Iterator[Finding]:
        with suppress(SluiceError):  # an error, which `check` reports
            yield from self._import_findings(source)[1]

    def _import_findings(self, source: ModelSource) -> tuple[list[Finding], list[Finding]]:
        """Return the errors and the notes on the model's imports; none where they are those of a packed environment.

        Raises INVALID where the environment cannot be used.
        """
        path = environment_path(source.config, source.folder) or self._environment
        python = None if path is None else check_environment(path)
        script, version_folder = self._script(source)
        if path is not None and python is None:
            return [], []
        folders = [Path(script).parent, Path(script).parent.parent, *([Path(version_folder)] if version_folder else [])]
        find = find_in_server if python is None else partial(find_modules, python)
        lent = set(WORKER_PACKAGES)
        return import_findings(Path(script), folders, lambda names: find(names) | lent.intersection(names))

    def _script(self, source: ModelSource) -> tuple[str, str]:
        """Return the file of the model's class, and the version's folder where modules of its own are found too."""
        return str(source.model_file), ""

    def _parse_options(self, context: BackendContext) -> PythonOptions:
        """Return the server's options, which are the same for all models."""
        if self._options is None:
            self._options = parse_options(context.backend_options.get(PythonBackend.name, {}))
        return self._options

    async def _lease_environment(self, source: ModelSource, options: PythonOptions) -> InterpreterLease:
        """Lease the model's own environment, else the configured runtime, else the server's own interpreter."""
        path = environment_path(source.config, source.folder) or self._environment or options.runtime
        if path is None:
            return InterpreterLease(SERVER_INTERPRETER)
        if path == options.runtime and not await asyncio.to_thread(path.is_dir):
            return InterpreterLease(await find_interpreter(path))
        return await self._environments.lease(path)


def _compile(script: Path) -> None:
    """Compile a model's code. Raises INVALID with the place of a syntax error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model may warn of its own code when it is loaded
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{script}:{error.lineno}" if error.lineno else str(script)
        raise invalid_argument(f"{place}: {type(error).__name__}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise invalid_argument(f"{script}: {type(error).__name__}: {error}") from None


def _refuse_services(message: WorkerMessage, process: PythonWorkerProcess) -> None:
    if not isinstance(message, WorkerReport):
        refuse_request(
            message, process.connection, "a model cannot ask the server while its configuration is completed"
        )


def create_workers(
    source: ModelSource,
    placements: Sequence[Placement],
    launches: Sequence[WorkerLaunch],
    context: BackendContext,
    script: tuple[str, str],
    shared: WorkerBatchQueue,
) -> list[SupervisedWorker]:
    """Create the workers without starting them. `script` is the file of the class, and the folder of other modules.

    They have the queue `shared`, so that batches a lost worker had not begun go to any other. With sequences each
    worker has its own, because the states are in its process.
    """
    has_sequences = source.config.HasField("sequence_batching")
    return [
        SupervisedWorker(
            initialize_command(source, place, *script),
            launch,
            context,
            WorkerBatchQueue(place.name) if has_sequences else shared,
        )
        for place, launch in zip(placements, launches, strict=True)
    ]


def _find_cores(placement: Placement, context: BackendContext) -> frozenset[int]:
    policy = choose_host_policy(placement, context.host_policies)
    return policy.cores if policy is not None else frozenset()


async def _start_all(workers: list[SupervisedWorker]) -> None:
    """Start all workers at the same time. If one fails, all are closed and the first error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.start())
    except BaseException as error:
        await asyncio.gather(*(worker.close() for worker in workers))
        raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None


def _can_queue_ahead(config: ModelConfig) -> bool:
    """Return whether a worker may get batches ahead: not where a batch could grow, or go elsewhere, in the meantime."""
    return not config.HasField("dynamic_batching") and not config.HasField("sequence_batching")


def initialize_command(
    source: ModelSource, placement: Placement, model_file: str, version_folder: str = ""
) -> Initialize:
    return Initialize(
        model_file,
        {
            "model_config": config_json(source.config).decode(),
            "model_instance_kind": placement.kind,
            "model_instance_name": placement.name,
            "model_instance_device_id": str(placement.gpu or 0),
            "model_repository": str(source.folder),
            "model_version": str(source.version),
            "model_name": source.name,
        },
        version_folder,
    )


class PythonBasedBackend(PythonBackend):
    """Triton's Python-based backend: a folder whose model.py has the class of all models that name the backend."""

    model_files = ()
    default_model_filename = ""

    def __init__(self, folder: Path) -> None:
        """`folder` has the backend's name, and perhaps the environment of its models as Triton packs it."""
        super().__init__()
        self.name = folder.name
        self._file = folder / PythonBackend.default_model_filename
        environment = folder / _PACKED_ENVIRONMENT
        self._environment = environment if environment.is_file() else None

    def _script(self, source: ModelSource) -> tuple[str, str]:
        return str(self._file), str(source.version_folder)


def find_python_based(directory: Path) -> list[PythonBasedBackend]:
    """Return a backend for each folder of `directory` with a model.py. Raises INVALID where it is no folder."""
    if not directory.is_dir():
        raise invalid_argument(f"the backend directory '{directory}' is no folder that can be read")
    files = directory.glob(f"*/{PythonBackend.default_model_filename}")
    return [PythonBasedBackend(file.parent) for file in sorted(files)]
