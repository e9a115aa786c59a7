"""The model repository of one server: it loads models from Triton's layout, and finds them by name while they serve."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backend import Backend, BackendContext, LoadOverrides
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.completion import ENSEMBLE
from sluice.serving.model import Model
from sluice.serving.repository.loader import BackgroundTasks, LoadHooks, VersionLoader, requested_by_model
from sluice.serving.repository.managed_model import IndexEntry, ManagedModel, ModelState
from sluice.serving.repository.polling import RepositoryPoller
from sluice.serving.repository.roots import Roots, open_roots, plain_name, qualified
from sluice.serving.repository.routing import Routing, VersionWeights
from sluice.serving.repository.settings import ControlMode, RepositorySettings
from sluice.serving.repository.updates import Failures, ModelUpdates
from sluice.serving.request import LATEST

_log = logging.getLogger(__name__)

T = TypeVar("T")

ALL_MODELS = "*"
_NUM_READERS = 16
"""Threads that read models' folders and wait for downloads. A store that hangs must not block the others."""
_LOAD_TIMEOUT_S = 3600.0
"""Limit on a load, longer than the slowest conversion of a large checkpoint. A backend must not hang for ever."""
_DRAIN_TIMEOUT_S = 600.0
"""Time for which requests in flight may go on in a model that was unloaded or replaced."""


class ModelRepository:
    """The models of one server. Threads read the file system and the network; all else happens on the event loop."""

    def __init__(
        self,
        roots: Sequence[str | Path],
        mode: ControlMode,
        context_factory: Callable[["RoutedModels"], BackendContext],
        poll_s: float = 15,
        strict_config: bool = False,
        on_note: Callable[[str], None] | None = None,
        *,
        registry: BackendRegistry | None = None,
        load_timeout_s: float = _LOAD_TIMEOUT_S,
        drain_timeout_s: float = _DRAIN_TIMEOUT_S,
        settings: RepositorySettings | None = None,
        hooks: LoadHooks | None = None,
    ) -> None:
        """`roots` are local folders and URLs of remote stores. `on_note` gets the messages that else are logged."""
        settings = settings or RepositorySettings()
        # Polls detect themselves whether a model has settled.
        rest_s = 0.0 if mode is ControlMode.POLL else settings.store_rest_s
        self._roots = Roots(open_roots(roots, settings.cache_path, rest_s), has_namespaces=settings.has_namespaces)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="sluice-repository")
        self._mode = mode
        self._models: dict[str, ManagedModel] = {}
        self._missing: dict[str, str] = {}
        self._loads = BackgroundTasks()
        self._drains = BackgroundTasks()
        self._is_started = False
        self._is_closing = False
        self._registry = registry or BackendRegistry()
        self._loader = VersionLoader(
            self._registry,
            context_factory(RoutedModels(self)),
            is_strict=strict_config,
            may_change=mode is ControlMode.POLL,
            num_parallel=settings.num_parallel_loads,
            timeout_s=load_timeout_s,
            num_retries=settings.num_load_retries,
            hooks=hooks or LoadHooks(),
        )
        self._updates = ModelUpdates(
            self._models,
            self._roots,
            self._readers,
            self._loader,
            strict_config,
            settings.config_name,
            on_note or _log.warning,
            (lambda message, _: on_note(message)) if on_note else _log_failure,
            drain_timeout_s,
            self._drains,
        )
        self._poller = RepositoryPoller(
            self._roots, self._readers, self._updates, self._loads, poll_s, on_note or _log.warning
        )
        self._polls: asyncio.Task[None] | None = None

    # What serves

    def find(self, name: str, version: int = LATEST) -> Model:
        """Return a version, the highest ready one for -1. Raises NOT_FOUND or UNAVAILABLE."""
        return self._managed(name).find(version)

    def route(self, name: str, version: int = LATEST, key: str = "") -> Model:
        """Return a version as `find` does; without a number, by the model's weights and `key`, else by chance."""
        return self._managed(name).route(version, key)

    def has_weights(self, name: str) -> bool:
        """Return whether the model's versions share requests. Raises NOT_FOUND."""
        return self._managed(name).weights is not None

    def routing(self, name: str) -> Routing:
        """Return how the versions share requests that name none. Raises NOT_FOUND."""
        return self._managed(name).routing()

    def set_weights(self, name: str, weights: Mapping[int, float] | None) -> None:
        """Share requests by `weights`; None restores the configuration's. Raises NOT_FOUND, INVALID for wrong ones."""
        known = self._managed(name)
        ready = [model.version for model in known.ready]
        for version in weights or {}:
            if version not in ready:
                listed = ", ".join(map(str, ready)) or "none"
                reason = f"version {version} of model '{name}' does not serve; those that do: {listed}"
                raise SluiceError(ErrorCode.INVALID, reason, param="weights")
        known.set_weights = None if weights is None else VersionWeights(dict(weights))

    def signature(self, name: str) -> str:
        """Return a text that is equal in another repository where that has loaded the same; "" for a model without a
        folder, or with a configuration that came with a request."""
        managed = self._models.get(name)
        candidate = None if managed is None else managed.candidate
        if candidate is None or candidate.is_overridden or candidate.folder.is_temporary:
            return ""
        return hashlib.sha256(repr(sorted(candidate.signatures.items())).encode()).hexdigest()

    def backend_of(self, config: ModelConfig) -> Backend | None:
        """Return the backend of a configuration; None where none is installed."""
        return self._registry.find(config.backend or ENSEMBLE)

    def versions(self, name: str) -> list[Model]:
        """Return the ready versions, ascending, at least one. Raises NOT_FOUND."""
        known = self._managed(name)
        known.find(LATEST)
        return known.ready

    def models(self) -> list[Model]:
        """Return every version that serves, by name and version."""
        return [model for _, managed in sorted(self._models.items()) for model in managed.ready]

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return every model by name and version; for one that was never loaded, its name alone.

        As in Triton, a model that came with a request and has no folder is only listed while it is ready. The models of
        the repository are those of its last reading: `refresh` reads it again.
        """
        rows = [row for managed in self._models.values() for row in managed.index()]
        if ready_only:
            rows = [row for row in rows if row.state is ModelState.READY]
        else:
            names = {
                *self._roots.naming.folders,
                *(name for name, managed in self._models.items() if managed.is_external),
            }
            rows = [row for row in rows if row.name in names]
            rows += [IndexEntry(name) for name in names - {row.name for row in rows}]
        return sorted(rows, key=lambda row: (row.name, row.version))

    @property
    def is_ready(self) -> bool:
        """Whether every model that should serve does: none is loading for the first time, and none has failed."""
        return not self.problem

    @property
    def problem(self) -> str:
        """The reason for which it is not ready; "" where it is."""
        if not self._is_started:
            return "the model repository is loading"
        missing = next(iter(self._missing.values()), "")
        return missing or next((each.problem for each in self._models.values() if each.problem), "")

    @property
    def num_failed_loads(self) -> Mapping[str, int]:
        return self._updates.failed_loads

    def _managed(self, name: str) -> ManagedModel:
        managed = self._models.get(name)
        if self._roots.has_namespaces and (managed is None or not managed.ready):
            managed = self._find_plain(name, managed)
        if managed is None or not managed.versions:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return managed

    def _find_plain(self, name: str, managed: ManagedModel | None) -> ManagedModel | None:
        """Return the model of the plain name. Raises INVALID for a name that several models share."""
        naming = self._roots.naming
        if name in naming.choices:
            choices = naming.choices[name]
            listed = ", ".join(f"'{each}'" for each in choices)
            message = (
                f"There are {len(choices)} identifiers of model '{name}', model namespace must be provided to resolve "
                f"ambiguity: name one of {listed}"
            )
            raise invalid_argument(message)
        return self._models.get(naming.canonical(name), managed)

    async def refresh(self) -> None:
        """Read the names of the repository's models again, for `index`. An unreadable root keeps those it had."""
        if not self._is_closing:
            await self._read(self._roots.refresh)

    async def _read(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    # What changes it

    def add(self, model: Model) -> None:
        """Serve a model that was loaded elsewhere and has no folder. Raises ALREADY_EXISTS."""
        managed = self._updates.managed(model.name)
        if model.version in managed.versions:
            raise SluiceError(ErrorCode.ALREADY_EXISTS, f"model '{model.name}' is already served")
        managed.add(model)

    def remove(self, model: Model) -> None:
        """Serve a model that was added no longer. The caller unloads it."""
        self._updates.managed(model.name).versions.pop(model.version, None)

    def expect(self, name: str) -> Callable[[], None]:
        """Expect a model that is loaded elsewhere: ensembles that call it wait for it, and its folder is not loaded.

        To be called before `start`. The caller calls the returned function once the model was added, or will not be.
        """
        is_there = self._updates.expected[name] = asyncio.Event()
        return is_there.set

    async def start(self, load: Sequence[str] = ()) -> Failures:
        """Load the models that the control mode selects, and return what failed.

        In explicit mode these are the models in `load`, "*" for all. Raises INVALID for a root that is not
        a folder or that nothing here reads, UNAVAILABLE for a store that does not answer.
        """
        names = [name for name in await self._read(self._names) if name not in self._updates.expected]
        match self._mode:
            case ControlMode.NONE:
                failures = await self._loads.start(self._updates.load(names))
            case ControlMode.EXPLICIT:
                wanted = names if ALL_MODELS in load else list(dict.fromkeys(load))
                failures = await self._loads.start(self._updates.load(wanted))
            case ControlMode.POLL:
                failures = await self._loads.start(self._poller.start())
                self._polls = self._loads.start(self._poller.run())
        self._missing = {name: failure.message for name, failure in failures.items() if name not in self._models}
        self._is_started = True
        return failures

    async def load(self, name: str, overrides: LoadOverrides | None = None) -> None:
        """Load a model or what has changed of it, and the members of an ensemble that do not serve yet.

        A plain name that repositories share loads the models of all of them, as in Triton. The load goes on when the
        caller is cancelled. Raises SluiceError in Triton's words, UNAVAILABLE in other modes than explicit.
        """
        self._check_explicit()
        _check_name(name)
        given = overrides if overrides is not None and overrides != LoadOverrides() else None
        for each in await self._selected(name):
            self._missing.pop(each, None)
            await asyncio.shield(self._loads.start(self._updates.load_one(each, given)))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model after the requests in flight. As in Triton, an unknown name is no error.

        `unload_dependents` also unloads the members of an ensemble that were loaded for it alone.
        """
        self._check_explicit()
        for each in await self._selected(name):
            self._missing.pop(each, None)
            await asyncio.shield(self._loads.start(self._updates.unload(each, with_members=unload_dependents)))

    async def close(self, timeout_s: float = 0.0) -> None:
        """Accept nothing new, wait up to `timeout_s` for requests in flight, and free everything. Idempotent."""
        self._is_closing = True
        deadline = time.monotonic() + timeout_s
        if self._polls is not None:
            self._polls.cancel()
        await self._loads.finish(deadline - time.monotonic())
        self._roots.stop()
        await asyncio.to_thread(self._readers.shutdown, cancel_futures=True)
        for managed in self._models.values():
            managed.forget()
            managed.unload()
        while self._drains:
            await self._drains.finish(deadline - time.monotonic())
        await self._loader.close()
        await asyncio.to_thread(self._roots.close)

    def _names(self) -> list[str]:
        try:
            return self._roots.names()
        except OSError as error:
            raise invalid_argument(f"the model repository cannot be read: {error}") from None

    async def _selected(self, name: str) -> tuple[str, ...]:
        """Return the repository's names for the models that a request names.

        Models that were loaded while their names were their own, and are not any more, get their new names first.
        """
        if not self._roots.has_namespaces:
            return (name,)
        await self.refresh()
        for plain in list(self._roots.naming.choices):
            await self._requalify(plain)
        return self._roots.naming.selected(name)

    async def _requalify(self, plain: str) -> None:
        """Give a loaded model, and steps that call it, its qualified name where repositories share the plain one."""
        managed, choices = self._models.get(plain), self._roots.naming.choices.get(plain, ())
        if managed is None or managed.candidate is None or not managed.ready or not choices:
            return
        own = qualified(managed.candidate.namespace, plain)
        if own in choices:
            await asyncio.shield(self._loads.start(self._updates.load_one(own, None)))
        for caller in self._updates.callers(plain):
            with suppress(SluiceError):  # logged, and unloaded with the plain name
                await asyncio.shield(self._loads.start(self._updates.load_one(caller, None)))
        await asyncio.shield(self._loads.start(self._updates.unload(plain)))

    def _check_explicit(self) -> None:
        if self._is_closing:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down")
        if self._mode is not ControlMode.EXPLICIT:
            # Triton's sentence in either mode, which its tests look for.
            message = "explicit model load / unload is not allowed if polling is enabled"
            raise SluiceError(ErrorCode.UNAVAILABLE, message)


def _log_failure(message: str, cause: BaseException | None) -> None:
    _log.error(message, exc_info=cause)


def _check_name(name: str) -> None:
    """Raise INVALID, in Triton's words, for a name that no folder can have."""
    plain = plain_name(name).strip()
    if not plain:
        raise invalid_argument("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in plain or plain in (".", ".."):
        raise invalid_argument(f"model name must not contain path traversal characters, got '{name}'")


class RoutedModels:
    """The repository for models that call or load others. Requests without a version are routed by weights."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def find(self, name: str, version: int = LATEST) -> Model:
        """Return a version as `ModelRepository.route` does, by chance."""
        return self._repository.route(name, version)

    async def load(self, name: str, overrides: LoadOverrides | None = None) -> None:
        token = requested_by_model.set(True)
        try:
            await self._repository.load(name, overrides)
        finally:
            requested_by_model.reset(token)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        await self._repository.unload(name, unload_dependents)
