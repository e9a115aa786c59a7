"""One model of the repository, with its versions: which serve, load, drain or have failed."""

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model
from sluice.serving.repository.candidate import ModelCandidate, VersionSignature
from sluice.serving.repository.failures import ModelFailure, as_sluice_error, failure_reason, versions_failed
from sluice.serving.repository.folders import ModelFolder
from sluice.serving.repository.loader import BackgroundTasks, VersionLoader
from sluice.serving.repository.routing import Routing, VersionWeights, configured_weights, routing_point
from sluice.serving.request import LATEST

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
"""Time that a model may take to close once it need not wait for requests."""
UNLOADED = "unloaded"
"""The index's reason for a version that was unloaded on purpose."""


class ModelState(StrEnum):
    """State of a version, as in the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A row of the repository index. A model that was never loaded has version 0 and no state."""

    name: str
    version: int = 0
    state: ModelState | None = None
    reason: str = ""


@dataclass(slots=True)
class _Version:
    """A version's state; where it is READY, with its loaded model."""

    state: ModelState
    reason: str = ""
    model: Model | None = None
    signature: VersionSignature | None = None
    folder: ModelFolder | None = None

    @property
    def has_failed(self) -> bool:
        return self.state is ModelState.UNAVAILABLE and self.reason != UNLOADED


@dataclass(slots=True)
class ManagedModel:
    """A model by name. Every change holds `lock`, so that loads and unloads of one model follow one another.

    `candidate` is the one that it was last loaded from. `should_serve`: an ensemble that lost its members is loaded
    again with them. `is_requested`: it was loaded by name, not only as a member of an ensemble. `is_external`: it was
    loaded elsewhere, and no folder replaces it. `has_folder`: it is in the repository, which is not ready without it.
    `set_weights`, set at run time, take precedence over `configured_weights`, and a load leaves them unchanged.
    """

    name: str
    drain_timeout_s: float
    drains: BackgroundTasks
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    versions: dict[int, _Version] = field(default_factory=dict)
    candidate: ModelCandidate | None = None
    should_serve: bool = False
    is_requested: bool = False
    is_external: bool = False
    has_folder: bool = True
    stale_reason: str = ""
    """The reason for which it serves other than what is in the repository; "" where it does not."""
    configured_weights: VersionWeights | None = None
    set_weights: VersionWeights | None = None

    @property
    def weights(self) -> VersionWeights | None:
        return self.set_weights or self.configured_weights

    def route(self, version: int, key: str) -> Model:
        """Return a version as `find` does; without a version number, the one that the weights choose for `key`."""
        weights = self.weights
        if version == LATEST and weights is not None:
            ready = {number: each.model for number, each in self.versions.items() if each.model is not None}
            chosen = weights.choose(ready, routing_point(self.name, key))
            if chosen is not None:
                return ready[chosen]
        return self.find(version)

    def routing(self) -> Routing:
        """Return the present shares of its versions."""
        ready = [model.version for model in self.ready]
        shares = self.weights.shares(ready) if self.weights is not None else {}
        if not shares and ready:
            shares = {version: float(version == ready[-1]) for version in reversed(ready)}
        return Routing(self.weights, shares, self.set_weights is not None)

    def find(self, version: int) -> Model:
        """Return a version, the highest ready one for LATEST. Raises NOT_FOUND, UNAVAILABLE where it is not ready."""
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
        """The versions that serve, ascending."""
        return [each.model for _, each in sorted(self.versions.items()) if each.model is not None]

    @property
    def problem(self) -> str:
        """Its fault where it does not serve as it should; "" where it does. The index and the log tell why."""
        if not self.has_folder:
            return ""
        for version, each in sorted(self.versions.items()):
            is_first = each.state is ModelState.LOADING and not self.ready
            if each.has_failed or is_first:
                return f"model '{self.name}' version {version} is {each.state}"
        return ""

    def index(self) -> list[IndexEntry]:
        return [
            IndexEntry(self.name, version, each.state, each.reason or (self.stale_reason if each.model else ""))
            for version, each in sorted(self.versions.items())
        ]

    def add(self, model: Model) -> None:
        """Add a version that was loaded elsewhere."""
        self.versions[model.version] = _Version(ModelState.READY, model=model)
        self.should_serve = self.is_requested = self.is_external = True

    def plan_to_serve(self, candidate: ModelCandidate) -> None:
        """Note that it should serve. An ensemble that cannot now may be loaded when its members change."""
        self.should_serve = True
        if self.candidate is None and candidate.is_ensemble and not candidate.folder.is_temporary:
            self._set_candidate(candidate)

    def fail(self, version: int, reason: str) -> None:
        """Note the reason for which it cannot be loaded. Versions that serve go on."""
        if self.ready:
            self.stale_reason = f"what lies in the repository cannot be loaded: {reason.strip()}"
        else:
            self.versions[version] = _Version(ModelState.UNAVAILABLE, reason)

    async def apply(self, candidate: ModelCandidate, loader: VersionLoader, *, is_forced: bool = False) -> bool:
        """Serve the candidate's versions. Returns whether anything changed. The caller holds the lock.

        Versions that are unchanged and not lost stay, unless `is_forced`. The others are loaded concurrently. Once all
        are loaded they take over, and versions that the candidate does not have are unloaded. Where a load fails,
        everything stays as it was: raises SluiceError in Triton's words.
        """
        if self.is_external:
            raise ModelFailure(self.name, "the server was started with a model of this name")
        if not candidate.versions:
            reason = f"at least one version must be available under the version policy of model '{self.name}'"
            raise ModelFailure(self.name, reason)
        try:
            weights = configured_weights(candidate.config)
        except SluiceError as error:
            raise ModelFailure(self.name, error.message) from None
        changed = [version for version in candidate.versions if is_forced or not self._is_current(candidate, version)]
        if not is_forced:
            changed = [version for version in changed if not await self._update(candidate, version, loader)]
        loaded = await self._load(candidate, changed, loader)
        for version, model in loaded.items():
            self._retire(version)
            candidate.folder.acquire()
            signature = candidate.signatures[version]
            self.versions[version] = _Version(ModelState.READY, "", model, signature, candidate.folder)
        self.configured_weights = weights
        self.stale_reason = ""
        for version in sorted(weights.by_version.keys() - set(candidate.versions)) if weights is not None else ():
            _log.warning("model '%s': version_weights name version %d, which does not serve", self.name, version)
        removed = [version for version in self.versions if version not in candidate.versions]
        for version in removed:
            self._retire(version)
        self._set_candidate(candidate)
        return bool(changed or removed)

    def unload(self, reason: str = UNLOADED) -> None:
        """Unload every version, under the lock; requests in flight go on. As in Triton, a failed version stays so."""
        for version, each in self.versions.items():
            if not each.has_failed:
                self._retire(version, reason)

    def forget(self) -> None:
        """Forget that and why it should serve."""
        self.should_serve = self.is_requested = self.is_external = False
        self.set_weights = None
        self._set_candidate(None)

    def _set_candidate(self, candidate: ModelCandidate | None) -> None:
        """Set the candidate, and keep its folder even if temporary: an ensemble may be loaded from it again."""
        previous, self.candidate = self.candidate, candidate
        if candidate is not None:
            candidate.folder.acquire()
        if previous is not None:
            self._release(previous.folder)

    def _release(self, folder: ModelFolder) -> None:
        if folder.release():
            self.drains.start_detached(asyncio.to_thread(folder.remove))

    def keeps_override(self, candidate: ModelCandidate) -> bool:
        """Return whether the same files serve already, with a configuration from a request.

        As in Triton, the folder's configuration takes its place only once something in the folder has changed.
        """
        serving = self.candidate if self.ready and not any(model.is_lost for model in self.ready) else None
        return serving is not None and serving.is_overridden and serving.state == candidate.state

    def _is_current(self, candidate: ModelCandidate, version: int) -> bool:
        serving = self.versions.get(version)
        if serving is None or serving.model is None or serving.model.is_lost:
            return False
        return serving.signature == candidate.signatures[version]

    async def _update(self, candidate: ModelCandidate, version: int, loader: VersionLoader) -> bool:
        """Change only the instances of a version. Returns False where more has changed, or it cannot change them."""
        serving = self.versions.get(version)
        if serving is None or serving.model is None or serving.model.is_lost:
            return False
        signature = candidate.signatures[version]
        if serving.folder is None or serving.signature is None or serving.signature.common != signature.common:
            return False
        try:
            if not await loader.update(serving.model, serving.folder, candidate.config):
                return False
        except SluiceError as error:
            raise versions_failed(self.name, {version: error}) from error
        serving.signature = signature
        return True

    async def _load(self, candidate: ModelCandidate, versions: list[int], loader: VersionLoader) -> dict[int, Model]:
        """Load all of `versions`, or none of them and raise an error."""
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
            if candidate.is_ensemble:
                cause = next(iter(problems.values()))
                raise ModelFailure(self.name, cause.message) from cause
            raise versions_failed(self.name, problems)
        return loaded

    def _serves(self, version: int) -> bool:
        return version in self.versions and self.versions[version].model is not None

    def _undo(self, loaded: dict[int, Model], problems: dict[int, SluiceError], candidate: ModelCandidate) -> None:
        """Unload the versions that were loaded: a model is loaded as a whole or not at all."""
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
        """Take a version out of service. It is closed after the requests in flight."""
        record = self.versions.get(version)
        if record is None:
            return
        model, record.model = record.model, None
        if model is not None:
            record.state = ModelState.UNLOADING
            # Not only when the drain starts: a caller that still waits for a request's body must see it at once.
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
                # Not cancelled: an unfinished close would leave processes behind.
                await unloading
            raise
        finally:
            record.state, record.reason = ModelState.UNAVAILABLE, reason
            if folder is not None:
                self._release(folder)


def _unknown(what: str) -> SluiceError:
    return SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: {what}")
