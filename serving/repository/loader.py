"""Loading of versions: completion and load by the backend, the order of models, and tasks in the background."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.batching.sequences.inputs import read_initial_states
from sluice.serving.batching.warm_up import warm_up
from sluice.serving.config.completion import ENSEMBLE
from sluice.serving.config.supported_fields import inactive_field_notes
from sluice.serving.config.validation import check_active_instances, check_tensors, complete_and_check
from sluice.serving.findings import Finding, InvalidConfig
from sluice.serving.latencies import build_latency_recorder
from sluice.serving.model import Model
from sluice.serving.repository.candidate import ModelCandidate
from sluice.serving.repository.failures import as_sluice_error
from sluice.serving.repository.folders import ModelFolder
from sluice.serving.spec import ModelSource, inner_path

_log = logging.getLogger(__name__)

T = TypeVar("T")

requested_by_model: ContextVar[bool] = ContextVar("requested_by_model", default=False)
"""Whether a model requested the load, perhaps while it is loaded itself: such a load must not wait for others."""


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """Steps that the server adds to every load.

    `substitute` may give a model another backend than its configuration names. `check` is called with each model before
    it serves, and raises SluiceError to keep it from serving.
    """

    substitute: Callable[[ModelConfig], ModelConfig] = lambda config: config
    check: Callable[[Model], object] = lambda model: None


class VersionLoader:
    """Loads versions, at most `num_parallel` at a time, each attempt within `timeout_s`.

    A version that fails is tried again at once, up to `num_retries` times, as with Triton's --model-load-retry-count.
    """

    def __init__(
        self,
        backends: BackendRegistry,
        context: BackendContext,
        *,
        is_strict: bool,
        may_change: bool,
        num_parallel: int,
        num_retries: int,
        timeout_s: float,
        hooks: LoadHooks,
    ) -> None:
        """`is_strict`: nothing is completed from the model's file. `may_change`: files may change during a load."""
        self.backends = backends
        self._context = context
        self._is_strict = is_strict
        self._may_change = may_change
        self._slots = asyncio.Semaphore(num_parallel)
        self._num_retries = num_retries
        self._timeout_s = timeout_s
        self._hooks = hooks
        self._imports: dict[str, asyncio.Task[None]] = {}

    async def load(self, candidate: ModelCandidate, version: int) -> Model:
        """Load a version. Raises SluiceError with the reason, whatever goes wrong in a backend."""
        for attempt in range(1, self._num_retries + 1):
            try:
                return await self._attempt(candidate, version)
            except SluiceError as error:
                _log.warning(
                    "model '%s' version %d cannot be loaded, attempt %d of %d: %s",
                    candidate.name, version, attempt, self._num_retries + 1, error.message,
                )  # fmt: skip
        return await self._attempt(candidate, version)

    async def _attempt(self, candidate: ModelCandidate, version: int) -> Model:
        return await self._guarded(self._load(candidate, version))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        async with nullcontext() if requested_by_model.get() else self._slots:
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await work
            except SluiceError:
                raise
            except Exception as error:
                if limit.expired():
                    raise SluiceError(ErrorCode.DEADLINE, f"loading took longer than {self._timeout_s:g} s") from None
                raise as_sluice_error(error) from error

    async def _load(self, candidate: ModelCandidate, version: int) -> Model:
        written = self._hooks.substitute(candidate.config)
        backend = await self._backend(written.backend or ENSEMBLE)
        config = deepcopy(written)
        config.default_model_filename = config.default_model_filename or backend.default_model_filename
        source = ModelSource(candidate.folder.path, version, config)
        await asyncio.to_thread(check_model_file, source, backend)
        if self._is_strict:
            check_tensors(config)
        else:
            config = complete_and_check(await backend.complete(source, self._context))
        check_active_instances(config)
        source = ModelSource(candidate.folder.path, version, config)
        await asyncio.to_thread(_check_label_files, source)
        await asyncio.to_thread(read_initial_states, source)
        for note in inactive_field_notes(config, self._context):
            _log.info("model '%s': %s", source.name, note)
        model = await backend.load(source, self._context)
        try:
            model.statistics.latencies = build_latency_recorder(model.config, self._context.latencies)
            await self._make_ready(model, source, candidate)
        except BaseException:
            await model.close()
            raise
        return model

    async def update(self, model: Model, folder: ModelFolder, written: ModelConfig) -> bool:
        """Give a model the instance groups of `written`, which differs in nothing else. Raises as `load`.

        Returns False where the model must be loaded again. A failed update leaves the model as it was.
        """
        config = deepcopy(model.config)
        config.ClearField("instance_group")
        config.instance_group.extend(written.instance_group)
        check_active_instances(config)
        source = ModelSource(folder.path, model.version, config)
        return await self._guarded(model.update_instances(source))

    async def _make_ready(self, model: Model, source: ModelSource, candidate: ModelCandidate) -> None:
        self._hooks.check(model)
        model.claim_resources()
        await warm_up(model, source)
        if self._may_change and not await asyncio.to_thread(candidate.is_intact, source.version):
            raise SluiceError(ErrorCode.UNAVAILABLE, "its files changed while it was being loaded")

    async def _backend(self, name: str) -> Backend:
        backend = await asyncio.to_thread(self.backends.get, name)
        if name not in self._imports:
            self._imports[name] = asyncio.create_task(_import_early(backend))
        return backend

    async def close(self) -> None:
        """Wait for the imports that run on threads."""
        await asyncio.gather(*self._imports.values())


async def _import_early(backend: Backend) -> None:
    # A failed import fails the load that needs it, with its reason.
    with suppress(Exception):
        await asyncio.to_thread(backend.start_loading_early)


def check_model_file(source: ModelSource, backend: Backend) -> None:
    """Raise INVALID where there is no model file. Where the GPU's capability chooses the file, the backend finds it."""
    config, name = source.config, source.config.default_model_filename
    # As Triton, `complete_kind` names a file for a backend that reads none.
    is_nominal = not backend.default_model_filename and name == f"model.{config.backend}"
    if not name or is_nominal or chooses_file(config, backend):
        return
    missing = missing_file(source, name, "default_model_filename")
    if missing is not None:
        raise InvalidConfig([missing])


def chooses_file(config: ModelConfig, backend: Backend) -> bool:
    """Return whether the GPU's compute capability chooses the file."""
    return "cc_model_filenames" in backend.supported_fields and bool(config.cc_model_filenames)


def missing_file(source: ModelSource, filename: str, path: str) -> Finding | None:
    """Return what is wrong with a file that field `path` names in the version's folder; None where it is there."""
    try:
        file = source.version_folder / inner_path(filename)
    except SluiceError as error:
        return Finding(error.message, path)
    if file.exists():
        return None
    there = sorted(each.name for each in source.version_folder.iterdir() if not each.name.startswith("."))
    message = f"there is no model file {file} for {source.name}"
    if there:
        message += f"; the folder has {', '.join(there[:5])}"
    fix = f'default_model_filename: "{there[0]}"' if len(there) == 1 and path == "default_model_filename" else ""
    return Finding(message, path, fix)


def _check_label_files(source: ModelSource) -> None:
    for error in label_file_errors(source):
        raise error


def label_file_errors(source: ModelSource) -> Iterator[SluiceError]:
    """Yield an error, which names the field, for each label file that is missing or lies outside of the folder."""
    for index, output in enumerate(source.config.output):
        param = f"output[{index}].label_filename"
        if not output.label_filename:
            continue
        try:
            path = source.folder / inner_path(output.label_filename)
        except SluiceError as error:
            yield SluiceError(error.code, error.message, param=param)
            continue
        if not path.is_file():
            reason = f"failed to open text file for read {path}: No such file or directory"
            yield SluiceError(ErrorCode.INTERNAL, reason, param=param)


def load_order(members: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, str]]:
    """Return the keys of `members`, each after its own members, and the reason for each that cannot load.

    An ensemble that contains itself, directly or not, is among the reasons and not in the order.
    """
    graph = {name: [each for each in inner if each in members] for name, inner in members.items()}
    circular: dict[str, str] = {}
    while True:
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            # graphlib's cycle begins and ends with one name, each a member of the next.
            cycle: list[str] = list(reversed(error.args[1]))
            for index, name in enumerate(cycle[:-1]):
                path = " -> ".join([*cycle[index:-1], *cycle[: index + 1]])
                circular[name] = f"circular dependency between ensembles: {path}"
                graph[name] = []
            continue
        return [name for name in order if name not in circular], circular


class BackgroundTasks:
    """Running tasks: each is kept until it is done, its failure is reported, and all are ended together."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task. Its error goes to the caller that awaits it; asyncio logs an error that nobody awaits."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def start_detached(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that nobody awaits. Its error goes to the log."""
        self.start(work).add_done_callback(_log_failure)

    async def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the tasks to end, then cancel the rest and wait for them."""
        running = list(self._running)
        if running:
            await asyncio.wait(running, timeout=max(0.0, timeout_s))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("work in the background failed", exc_info=task.exception())
