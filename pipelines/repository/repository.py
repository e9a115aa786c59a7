"""The models of one server: loaded from Triton's repository layout, found by name, changed while they serve."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import BackendContext, ModelLookup
from pipelines.backends.registry import BackendRegistry
from pipelines.inference.model import Model
from pipelines.inference.types import LATEST
from pipelines.repository.folders import FolderState, model_names
from pipelines.repository.loader import VersionLoader
from pipelines.repository.managed import ManagedModel
from pipelines.repository.poller import Changes, Poller
from pipelines.repository.routing import RoutedModels, Routing, VersionWeights
from pipelines.repository.tasks import Tasks
from pipelines.repository.types import ControlMode, IndexEntry, LoadOverrides, ModelState
from pipelines.repository.updates import Failures, ModelUpdates

_log = logging.getLogger(__name__)

ALL_MODELS = "*"
_NUM_PARALLEL_LOADS = 4
"""As Triton's --model-load-thread-count."""
_LOAD_TIMEOUT_S = 3600.0
"""Longer than the slowest conversion of a large checkpoint; a backend that hangs does not hang the model for ever."""
_DRAIN_TIMEOUT_S = 600.0
"""How long requests under way may go on in a model that was unloaded or replaced."""
_FIRST_LOOK_REST_S = 1.0
"""How long files must be untouched to be loaded at the start in poll mode without a second look."""


class ModelRepository:
    """A `ModelLookup`. Everything but the file system's reading happens on the event loop."""

    def __init__(
        self,
        roots: Sequence[Path],
        mode: ControlMode,
        context_factory: Callable[[ModelLookup], BackendContext],
        poll_s: float = 15,
        strict_config: bool = False,
        on_note: Callable[[str], None] = _log.info,
        *,
        registry: BackendRegistry | None = None,
        load_timeout_s: float = _LOAD_TIMEOUT_S,
        drain_timeout_s: float = _DRAIN_TIMEOUT_S,
    ) -> None:
        self._roots = [Path(root) for root in roots]
        self._mode = mode
        self._poll_s = poll_s
        self._on_note = on_note
        self._models: dict[str, ManagedModel] = {}
        self._missing: dict[str, str] = {}
        self._loads = Tasks()
        self._drains = Tasks()
        self._poller = Poller(self._roots)
        self._polling: asyncio.Task[None] | None = None
        self._changing: set[str] = set()
        """What a look has found and is being loaded or unloaded."""
        self._is_started = False
        self._is_closing = False
        self._loader = VersionLoader(
            registry or BackendRegistry(),
            context_factory(RoutedModels(self)),
            is_strict=strict_config,
            is_watchful=mode is ControlMode.POLL,
            num_parallel=_NUM_PARALLEL_LOADS,
            timeout_s=load_timeout_s,
        )
        self._updates = ModelUpdates(
            self._models, self._roots, self._loader, strict_config, on_note, drain_timeout_s, self._drains
        )

    # What serves

    def find(self, name: str, version: int = LATEST) -> Model:
        """The version of that name, the highest ready one for -1. Raises SluiceError NOT_FOUND or UNAVAILABLE."""
        return self._known(name).find(version)

    def route(self, name: str, version: int = LATEST, key: str = "") -> Model:
        """As `find`; of a model whose versions have weights, the one that `key` falls to: by chance where it is ""."""
        return self._known(name).route(version, key)

    def has_weights(self, name: str) -> bool:
        """Whether the model's versions share requests. Raises SluiceError NOT_FOUND."""
        return self._known(name).weights is not None

    def routing(self, name: str) -> Routing:
        """How the versions share what names none. Raises SluiceError NOT_FOUND."""
        return self._known(name).routing()

    def set_weights(self, name: str, weights: Mapping[int, float] | None) -> None:
        """Share requests out by `weights` from now on; None goes back to what the configuration says.

        Raises SluiceError NOT_FOUND, INVALID for weights that are none and for a version that does not serve.
        """
        known = self._known(name)
        ready = [model.version for model in known.ready]
        for version in weights or {}:
            if version not in ready:
                listed = ", ".join(map(str, ready)) or "none"
                reason = f"version {version} of model '{name}' does not serve; those that do: {listed}"
                raise SluiceError(ErrorCode.INVALID, reason, param="weights")
        known.set_weights = None if weights is None else VersionWeights(dict(weights))

    def versions(self, name: str) -> list[Model]:
        """The ready versions, ascending, at least one. Raises SluiceError NOT_FOUND."""
        known = self._known(name)
        known.find(LATEST)
        return known.ready

    def models(self) -> list[Model]:
        """Every version that serves, by name and version."""
        return [model for _, managed in sorted(self._models.items()) for model in managed.ready]

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Every model by name and version; one that was never loaded has its name alone.

        As with the real server, one that came with a request and has no folder is listed only among the ready.
        """
        rows = [row for managed in self._models.values() for row in managed.index()]
        if ready_only:
            rows = [row for row in rows if row.state is ModelState.READY]
        else:
            names = {*self._folder_names(), *(name for name, managed in self._models.items() if managed.is_fixed)}
            rows = [row for row in rows if row.name in names]
            rows += [IndexEntry(name) for name in names - {row.name for row in rows}]
        return sorted(rows, key=lambda row: (row.name, row.version))

    @property
    def is_ready(self) -> bool:
        """Whether every model that should serve does: nothing loads for the first time, and nothing has failed."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Why it is not ready; "" where it is."""
        if not self._is_started:
            return "the model repository is loading"
        missing = next(iter(self._missing.values()), "")
        return missing or next((each.problem for each in self._models.values() if each.problem), "")

    def _known(self, name: str) -> ManagedModel:
        managed = self._models.get(name)
        if managed is None or not managed.versions:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return managed

    def _folder_names(self) -> list[str]:
        try:
            return list(model_names(self._roots))
        except OSError:
            return []

    # What changes it

    def add(self, model: Model) -> None:
        """Serve a model that was loaded elsewhere and has no folder. Raises SluiceError ALREADY_EXISTS."""
        managed = self._updates.managed(model.name)
        if model.version in managed.versions:
            raise SluiceError(ErrorCode.ALREADY_EXISTS, f"model '{model.name}' is already served")
        managed.add(model)

    async def start(self, load: Sequence[str] = ()) -> Failures:
        """Load what the mode says, `load` in explicit mode ("*": everything), and tell what could not be loaded.

        Raises SluiceError INVALID for a root that is no folder.
        """
        names = list(await asyncio.to_thread(_names, self._roots))
        match self._mode:
            case ControlMode.NONE:
                failures = await self._loads.begin(self._updates.load(names))
            case ControlMode.EXPLICIT:
                wanted = names if ALL_MODELS in load else list(dict.fromkeys(load))
                failures = await self._loads.begin(self._updates.load(wanted))
            case ControlMode.POLL:
                failures = await self._loads.begin(self._first_look())
                self._polling = self._loads.begin(self._poll_for_ever())
        self._missing = {name: failure.message for name, failure in failures.items() if name not in self._models}
        self._is_started = True
        return failures

    async def load(self, name: str, overrides: LoadOverrides | None = None) -> None:
        """Load the model, or again what has changed of it, and the members of an ensemble that do not serve yet.

        The load goes on when the caller is cancelled. Raises SluiceError in Triton's words, UNAVAILABLE in other modes
        than explicit.
        """
        self._check_explicit()
        self._missing.pop(name, None)
        given = overrides if overrides is not None and overrides != LoadOverrides() else None
        await asyncio.shield(self._loads.begin(self._updates.load_one(name, given)))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Take the model out of service; requests under way end. Unknown names are no error, as with Triton.

        `unload_dependents` takes along the members of an ensemble that were loaded for it alone.
        """
        self._check_explicit()
        self._missing.pop(name, None)
        await asyncio.shield(self._loads.begin(self._updates.unload(name, with_members=unload_dependents)))

    async def close(self, timeout_s: float = 0.0) -> None:
        """Take nothing new, let requests end for up to `timeout_s`, and free everything. Idempotent."""
        self._is_closing = True
        deadline = time.monotonic() + timeout_s
        if self._polling is not None:
            self._polling.cancel()
        await self._loads.end(deadline - time.monotonic())
        for managed in self._models.values():
            managed.forget()
            managed.unload()
        while self._drains:
            await self._drains.end(deadline - time.monotonic())
        await self._loader.close()

    def _check_explicit(self) -> None:
        if self._is_closing:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down")
        if self._mode is not ControlMode.EXPLICIT:
            raise SluiceError(
                ErrorCode.UNAVAILABLE,
                "explicit model load / unload is not allowed "
                + ("if polling is enabled" if self._mode is ControlMode.POLL else "in model control mode none"),
            )

    # Polling

    async def _first_look(self) -> Failures:
        """Load what lies still. What does not has a second to come to rest; later, the next look will take it up."""
        rest_s = min(self._poll_s, _FIRST_LOOK_REST_S)
        changes, work = await self._take_up(time.time_ns() - int(rest_s * 1e9))
        failures = await work
        if not changes.is_resting:
            await asyncio.sleep(rest_s)
            _, work = await self._take_up()
            failures.update(await work)
        return failures

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self._take_up()
            except Exception as error:
                # Whatever went wrong with this look, the next one may go well.
                _log.debug("a look at the model repository failed", exc_info=error)
                self._on_note(f"the model repository cannot be read: {type(error).__name__}: {error}")

    async def _take_up(self, settled_before_ns: int = 0) -> tuple[Changes, asyncio.Task[Failures]]:
        """Look, and begin to load and unload accordingly. A model that is at it is looked at when it is done."""
        look = await asyncio.to_thread(self._poller.look)
        changes = self._poller.take(look, settled_before_ns, self._changing)
        states = {name: look[name][0][1] for name in changes.changed}
        return changes, self._loads.begin(self._follow(changes, states))

    async def _follow(self, changes: Changes, states: Mapping[str, FolderState]) -> Failures:
        names = {*changes.changed, *changes.removed}
        self._changing |= names
        try:
            for name in changes.removed:
                await self._updates.remove(name)
            return await self._updates.load(changes.changed, states)
        finally:
            self._changing -= names


def _names(roots: Iterable[Path]) -> dict[str, list[Path]]:
    try:
        return model_names(roots)
    except OSError as error:
        raise SluiceError(ErrorCode.INVALID, f"the model repository cannot be read: {error}") from None
