"""One version of a candidate becomes a `Model`: its backend completes the configuration, and loads what is valid."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, BackendContext
from serving.backends.registry import BackendRegistry
from serving.batching.sequences.inputs import check_initial_states
from serving.batching.warm_up import warm_up
from serving.config.completion import ENSEMBLE, normalize
from serving.config.supported_fields import inactive_field_notes
from serving.config.validation import check_tensors
from serving.latencies import latency_recorder
from serving.model import Model
from serving.repository.candidate import Candidate
from serving.repository.failures import unexpected
from serving.spec import ModelSource, inner_path
from sluice.errors import ErrorCode, SluiceError

_log = logging.getLogger(__name__)

asked_by_model: ContextVar[bool] = ContextVar("asked_by_model", default=False)
"""Whether a model asked for the load, maybe while it is loaded itself: then it must not wait for other loads."""


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """What the server adds to loading, and no backend knows of.

    `substitute` may give a model another backend than its configuration names. `check` sees each model before it
    serves, and raises SluiceError where it must not.
    """

    substitute: Callable[[ModelConfig], ModelConfig] = lambda config: config
    check: Callable[[Model], object] = lambda model: None


class VersionLoader:
    """Loads versions, no more than `num_parallel` at a time, each within `timeout_s`."""

    def __init__(
        self,
        backends: BackendRegistry,
        context: BackendContext,
        *,
        is_strict: bool,
        is_watchful: bool,
        num_parallel: int,
        timeout_s: float,
        hooks: LoadHooks,
    ) -> None:
        """`is_strict`: nothing is completed from the model's file. `is_watchful`: files may change under a load."""
        self.backends = backends
        self._context = context
        self._is_strict = is_strict
        self._is_watchful = is_watchful
        self._slots = asyncio.Semaphore(num_parallel)
        self._timeout_s = timeout_s
        self._hooks = hooks
        self._warmed: dict[str, asyncio.Task[None]] = {}

    async def load(self, candidate: Candidate, version: int) -> Model:
        """Raises SluiceError with the reason, whatever goes wrong in a backend."""
        async with nullcontext() if asked_by_model.get() else self._slots:
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await self._load(candidate, version)
            except SluiceError:
                raise
            except Exception as error:
                if limit.expired():
                    message = f"loading took longer than {self._timeout_s:g} s"
                    raise SluiceError(ErrorCode.DEADLINE, message) from None
                _log.exception("model '%s' version %d cannot be loaded", candidate.name, version)
                raise unexpected(error) from error

    async def _load(self, candidate: Candidate, version: int) -> Model:
        written = self._hooks.substitute(candidate.config)
        backend = await self._backend(written.backend or ENSEMBLE)
        config = ModelConfig()
        config.CopyFrom(written)
        config.default_model_filename = config.default_model_filename or backend.default_model_filename
        source = ModelSource(candidate.folder.path, version, config)
        await asyncio.to_thread(_check_model_file, source)
        if not self._is_strict:
            config = await self._complete(backend, source)
        check_tensors(config)
        _check_instances(config)
        source = ModelSource(candidate.folder.path, version, config)
        await asyncio.to_thread(_check_label_files, source)
        await asyncio.to_thread(check_initial_states, source)
        for note in inactive_field_notes(config, self._context):
            _log.info("model '%s': %s", source.name, note)
        model = await backend.load(source, self._context)
        try:
            model.statistics.latencies = latency_recorder(model.config, self._context.latencies)
            await self._make_ready(model, source, candidate)
        except BaseException:
            await model.close()
            raise
        return model

    async def _make_ready(self, model: Model, source: ModelSource, candidate: Candidate) -> None:
        self._hooks.check(model)
        model.claim_resources()
        await warm_up(model, source)
        if self._is_watchful and not await asyncio.to_thread(candidate.is_intact, source.version):
            raise SluiceError(ErrorCode.UNAVAILABLE, "its files changed while it was being loaded")

    async def _complete(self, backend: Backend, source: ModelSource) -> ModelConfig:
        completed = ModelConfig()
        completed.CopyFrom(await backend.complete(source, self._context))
        normalize(completed)
        return completed

    async def _backend(self, name: str) -> Backend:
        backend = await asyncio.to_thread(self.backends.get, name)
        if name not in self._warmed:
            self._warmed[name] = asyncio.create_task(_warm(backend.start_loading_early))
        return backend

    async def close(self) -> None:
        """Wait for what was begun early."""
        await asyncio.gather(*self._warmed.values())


async def _warm(start_loading_early: Callable[[], None]) -> None:
    # What cannot be imported fails the load that needs it, with its reason.
    with suppress(Exception):
        await asyncio.to_thread(start_loading_early)


def _check_instances(config: ModelConfig) -> None:
    if config.instance_group and all(group.passive for group in config.instance_group):
        reason = f"all instances of model '{config.name}' are passive, and passive ones take no requests"
        raise SluiceError(ErrorCode.INVALID, reason)


def _check_model_file(source: ModelSource) -> None:
    """Say at once that there is nothing to load; which file a GPU's capability chooses is its backend's to say."""
    name = source.config.default_model_filename
    if name and not source.config.cc_model_filenames and not (source.version_folder / inner_path(name)).exists():
        raise SluiceError(ErrorCode.INVALID, f"there is no model file {source.model_file} for {source.name}")


def _check_label_files(source: ModelSource) -> None:
    for name in (output.label_filename for output in source.config.output if output.label_filename):
        path = source.folder / inner_path(name)
        if not path.is_file():
            reason = f"failed to open text file for read {path}: No such file or directory"
            raise SluiceError(ErrorCode.INTERNAL, reason)
