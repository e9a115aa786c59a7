"""One model of the repository by name: which of its versions serve, load, drain or have failed."""

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum

from serving.model import Model
from serving.repository.candidate import ModelCandidate, Signature
from serving.repository.failures import as_sluice_error, failure_reason, load_failed, versions_failed
from serving.repository.folders import ModelFolder
from serving.repository.loader import BackgroundTasks, VersionLoader
from serving.repository.routing import Routing, VersionWeights, configured_weights, routing_point
from serving.request import LATEST
from sluice.errors import ErrorCode, SluiceError


class ModelState(StrEnum):
    """Of one version, in the repository index's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A row of the repository index. A model that was never loaded has its name alone: version 0 and no state."""

    name: str
    version: int = 0
    state: ModelState | None = None
    reason: str = ""


_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
"""How long a model that need not wait for requests any more may take to free what it holds."""
UNLOADED = "unloaded"
"""The index's reason for a version that was taken away on purpose."""


@dataclass(slots=True)
class _Version:
    """A version's state and, where it is READY, what serves it."""

    state: ModelState
    reason: str = ""
    model: Model | None = None
    signature: Signature = ()
    folder: ModelFolder | None = None

    @property
    def has_failed(self) -> bool:
        return self.state is ModelState.UNAVAILABLE and self.reason != UNLOADED


@dataclass(slots=True)
class ManagedModel:
    """Whatever changes it holds `lock`, so that loads and unloads of one model follow one another.

    `candidate` is what it was last loaded from. `is_wanted`: it is to serve, and an ensemble that its members left
    comes back with them. `is_explicit`: asked for by name, not only as a member of an ensemble. `is_fixed`: it was
    loaded elsewhere, and no folder replaces it. `has_folder`: it lies in the repository, and did not only come with a
    request: whether anybody misses it when it does not serve. `weights` of its versions: what was asked for at run
    time, which a load leaves as it is, over what its configuration says.
    """

    name: str
    drain_timeout_s: float
    drains: BackgroundTasks
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    versions: dict[int, _Version] = field(default_factory=dict)
    candidate: ModelCandidate | None = None
    is_wanted: bool = False
    is_explicit: bool = False
    is_fixed: bool = False
    has_folder: bool = True
    outdated: str = ""
    """Why what serves is not what lies in the repository; "" where it is."""
    configured_weights: VersionWeights | None = None
    set_weights: VersionWeights | None = None

    @property
    def weights(self) -> VersionWeights | None:
        return self.set_weights or self.configured_weights

    def route(self, version: int, key: str) -> Model:
        """As `find`; where no version is named and there are weights, the one that they give to `key`."""
        weights = self.weights
        if version == LATEST and weights is not None:
            ready = {number: each.model for number, each in self.versions.items() if each.model is not None}
            chosen = weights.choose(ready, routing_point(self.name, key))
            if chosen is not None:
                return ready[chosen]
        return self.find(version)

    def routing(self) -> Routing:
        ready = [model.version for model in self.ready]
        shares = self.weights.shares(ready) if self.weights is not None else {}
        if not shares and ready:
            shares = {version: float(version == ready[-1]) for version in reversed(ready)}
        return Routing(self.weights, shares, self.set_weights is not None)

    def find(self, version: int) -> Model:
        """Raises SluiceError in Triton's words: NOT_FOUND, or UNAVAILABLE for a version that is not ready."""
        if version == LATEST:
            version = max((number for number, each in self.versions.items() if each.model is not None), default=LATEST)
            if version == LATEST:
                raise _unknown(f"'{self.name}' has no available versions")
        found = self.versions.get(version)
        if found is None:
            raise _unknown(f"'{self.name}' version {version} is not found")
        if found.model is None:
            message = f"Request for unknown model: '{self.name}' version {version} is not at ready state"
            raise SluiceError(ErrorCode.UNAVAILABLE, message)
        return found.model

    @property
    def ready(self) -> list[Model]:
        """Every version that serves, ascending."""
        return [each.model for _, each in sorted(self.versions.items()) if each.model is not None]

    @property
    def problem(self) -> str:
        """Why it does not serve all that it should; "" where it does."""
        if not self.has_folder:
            return ""
        for version, each in sorted(self.versions.items()):
            is_first = each.state is ModelState.LOADING and not self.ready
            if each.has_failed or is_first:
                what = f"model '{self.name}' version {version} is {each.state}"
                return f"{what}: {each.reason}" if each.reason else what
        return ""

    def index(self) -> list[IndexEntry]:
        return [
            IndexEntry(self.name, version, each.state, each.reason or (self.outdated if each.model else ""))
            for version, each in sorted(self.versions.items())
        ]

    def add(self, model: Model) -> None:
        """A version that was loaded elsewhere."""
        self.versions[model.version] = _Version(ModelState.READY, model=model)
        self.is_wanted = self.is_explicit = self.is_fixed = True

    def want(self, candidate: ModelCandidate) -> None:
        """It is to serve; an ensemble that cannot now may be loaded when its members change."""
        self.is_wanted = True
        if self.candidate is None and candidate.is_ensemble and not candidate.folder.is_temporary:
            self._remember(candidate)

    def fail(self, version: int, reason: str) -> None:
        """Note why it cannot be loaded, without harm to what serves."""
        if self.ready:
            self.outdated = f"what lies in the repository cannot be loaded: {reason.strip()}"
        else:
            self.versions[version] = _Version(ModelState.UNAVAILABLE, reason)

    async def apply(self, candidate: ModelCandidate, loader: VersionLoader, *, is_forced: bool = False) -> bool:
        """Serve what `candidate` says, and tell whether anything had to change. Hold the lock.

        Versions that are as they were and not lost stay, unless `is_forced`. The others are loaded side by side, and
        only when all of them are there do they take over, and versions that are not wanted any more go. Otherwise
        everything stays as it was: raises SluiceError in Triton's words.
        """
        if self.is_fixed:
            raise load_failed(self.name, "the server was started with a model of this name")
        if not candidate.versions:
            reason = f"at least one version must be available under the version policy of model '{self.name}'"
            raise load_failed(self.name, reason)
        try:
            weights = configured_weights(candidate.config)
        except SluiceError as error:
            raise load_failed(self.name, error.message) from None
        fresh = [version for version in candidate.versions if is_forced or not self._is_current(candidate, version)]
        loaded = await self._load(candidate, fresh, loader)
        for version, model in loaded.items():
            self._retire(version)
            candidate.folder.acquire()
            signature = candidate.signatures[version]
            self.versions[version] = _Version(ModelState.READY, "", model, signature, candidate.folder)
        self.configured_weights = weights
        self.outdated = ""
        for version in sorted(weights.by_version.keys() - set(candidate.versions)) if weights is not None else ():
            _log.warning("model '%s': version_weights name version %d, which does not serve", self.name, version)
        gone = [version for version in self.versions if version not in candidate.versions]
        for version in gone:
            self._retire(version)
        self._remember(candidate)
        return bool(fresh or gone)

    def unload(self, reason: str = UNLOADED) -> None:
        """Serve nothing any more; what is under way ends in the background. Hold the lock.

        What has failed stays so, as with the real server: only a load that goes well repairs it.
        """
        for version, each in self.versions.items():
            if not each.has_failed:
                self._retire(version, reason)

    def forget(self) -> None:
        """It is not wanted any more, as whatever."""
        self.is_wanted = self.is_explicit = self.is_fixed = False
        self.set_weights = None
        self._remember(None)

    def _remember(self, candidate: ModelCandidate | None) -> None:
        """Keep what it is loaded from, and with it a temporary folder: an ensemble may be loaded from it again."""
        left, self.candidate = self.candidate, candidate
        if candidate is not None:
            candidate.folder.acquire()
        if left is not None:
            self._let_go(left.folder)

    def _let_go(self, folder: ModelFolder) -> None:
        if folder.release():
            self.drains.start_detached(asyncio.to_thread(folder.remove))

    def keeps_override(self, candidate: ModelCandidate) -> bool:
        """Whether these very files serve already, with the configuration that a request brought.

        The real server, too, goes back to the folder's configuration only when something in the folder has changed.
        """
        serving = self.candidate if self.ready and not any(model.is_lost for model in self.ready) else None
        return serving is not None and serving.is_overridden and serving.state == candidate.state

    def _is_current(self, candidate: ModelCandidate, version: int) -> bool:
        serving = self.versions.get(version)
        if serving is None or serving.model is None or serving.model.is_lost:
            return False
        return serving.signature == candidate.signatures[version]

    async def _load(self, candidate: ModelCandidate, versions: list[int], loader: VersionLoader) -> dict[int, Model]:
        """All of `versions`, or an error and none of them."""
        loaded: dict[int, Model] = {}
        problems: dict[int, SluiceError] = {}

        async def load(version: int) -> None:
            try:
                loaded[version] = await loader.load(candidate, version)
            except SluiceError as error:
                problems[version] = error
            except BaseException as error:
                problems[version] = as_sluice_error(error)
                raise

        for version in versions:
            if not self._serves(version):
                self.versions[version] = _Version(ModelState.LOADING)
        try:
            await asyncio.gather(*map(load, versions))
        except BaseException:
            self._undo(loaded, problems, candidate)
            raise
        if problems:
            self._undo(loaded, problems, candidate)
            failed = problems.values()
            if candidate.is_ensemble:
                raise load_failed(self.name, next(iter(failed)).message)
            raise versions_failed(self.name, problems)
        return loaded

    def _serves(self, version: int) -> bool:
        return version in self.versions and self.versions[version].model is not None

    def _undo(self, loaded: dict[int, Model], problems: dict[int, SluiceError], candidate: ModelCandidate) -> None:
        """A model is loaded whole or not at all: let go of the versions that went well."""
        for version, error in problems.items():
            if not self._serves(version):
                self.versions[version] = _Version(ModelState.UNAVAILABLE, failure_reason(error))
        for version, model in loaded.items():
            candidate.folder.acquire()
            record = _Version(ModelState.UNLOADING)
            if not self._serves(version):
                self.versions[version] = record
            self.drains.start_detached(self._drain(record, model, candidate.folder))

    def _retire(self, version: int, reason: str = UNLOADED) -> None:
        """Take a version out of service; the requests under way end with it."""
        record = self.versions.get(version)
        if record is None:
            return
        model, record.model = record.model, None
        if model is not None:
            record.state = ModelState.UNLOADING
            # Not only when the drain begins: who has found it and still waits for a body must see it at once.
            model.retire()
            _log.info("model '%s' version %d takes no more requests: %s", self.name, version, reason)
            self.drains.start_detached(self._drain(record, model, record.folder, reason))
        elif record.state is ModelState.UNAVAILABLE:
            record.reason = reason

    async def _drain(self, record: _Version, model: Model, folder: ModelFolder | None, reason: str = UNLOADED) -> None:
        unloading = asyncio.ensure_future(model.unload(self.drain_timeout_s))
        try:
            await asyncio.shield(unloading)
        except asyncio.CancelledError:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if not model.is_idle:
                    await model.close()
                # Not cancelled: half a close would leave processes behind.
                await unloading
            raise
        finally:
            record.state, record.reason = ModelState.UNAVAILABLE, reason
            if folder is not None:
                self._let_go(folder)


def _unknown(what: str) -> SluiceError:
    return SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: {what}")
