"""Loads and unloads by name: members load before their ensembles, and ensembles again after their members."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from sluice.errors import SluiceError
from sluice.serving.backend import LoadOverrides
from sluice.serving.repository.candidate import ModelCandidate, ModelReading, read_model
from sluice.serving.repository.failures import ModelFailure, failure_reason, unexpected_cause
from sluice.serving.repository.folders import FolderState
from sluice.serving.repository.loader import BackgroundTasks, VersionLoader, load_order
from sluice.serving.repository.managed_model import ManagedModel
from sluice.serving.repository.roots import Roots
from sluice.serving.request import LATEST

_log = logging.getLogger(__name__)

Failures = dict[str, SluiceError]
"""Errors of loads, by model."""
Candidates = dict[str, ModelCandidate]


@dataclass(slots=True)
class ModelUpdates:
    """Loads and unloads models. It is the only writer of `models`."""

    models: dict[str, ManagedModel]
    roots: Roots
    readers: Executor
    loader: VersionLoader
    is_strict: bool
    config_name: str
    on_note: Callable[[str], None]
    on_failure: Callable[[str, BaseException | None], None]
    """Gets a failure's message, and the exception whose trace explains it where it was unexpected."""
    drain_timeout_s: float
    drains: BackgroundTasks
    failed_loads: Counter[str] = field(default_factory=Counter)
    """Number of failed loads of each model."""
    _missing_members: dict[str, frozenset[str]] = field(default_factory=dict)
    """Members that were missing at each ensemble's last load."""
    expected: dict[str, asyncio.Event] = field(default_factory=dict)
    """Models that are loaded elsewhere. Their event is set once they serve, or will not."""
    _requests: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def managed(self, name: str) -> ManagedModel:
        """Return the model of that name, a new one for a new name."""
        if name not in self.models:
            self.models[name] = ManagedModel(name, self.drain_timeout_s, self.drains)
        return self.models[name]

    async def load(self, names: Iterable[str]) -> Failures:
        """Load models from their folders, with the members that they need. Returns what failed."""
        candidates, failures = await self._read(names)
        return {**failures, **await self._load_candidates(await self._with_members(candidates))}

    async def load_settled(self, states: Mapping[str, FolderState | None]) -> Failures:
        """Load models whose settled folders have these states, without missing members. Returns what failed."""
        found, failures = await self._read(states)
        candidates = {}
        for name, candidate in found.items():
            if candidate.state == states[name]:
                candidates[name] = candidate
            else:
                self._release(candidate)
        return {**failures, **await self._load_candidates(candidates)}

    def ensembles(self) -> list[str]:
        """Return the names of the ensembles that serve or did."""
        return [name for name, each in self.models.items() if each.candidate is not None and each.candidate.is_ensemble]

    def callers(self, name: str) -> list[str]:
        """Return the names of the ensembles that should serve and call a model."""
        return [each.name for each in self._callers([name])]

    def waiting_for(self, names: Iterable[str]) -> list[str]:
        """Return the ensembles whose last load missed any of `names`."""
        loaded = set(names)
        return [name for name, missing in self._missing_members.items() if missing & loaded]

    async def load_one(self, name: str, overrides: LoadOverrides | None) -> None:
        """Load a model from its folder or from a load request. Raises SluiceError in Triton's words."""
        # Requests for one model follow one another, reads included: a later read must not be applied earlier.
        lock = self._requests.setdefault(name, asyncio.Lock())
        async with lock:
            candidates, failures = await self._read([name], overrides)
            if overrides is None and name in candidates and self.managed(name).keeps_override(candidates[name]):
                self._release(candidates[name])
                return
            failures = failures or await self._load_candidates(await self._with_members(candidates))
        if name in failures:
            raise failures[name]

    async def unload(self, name: str, *, with_members: bool = False) -> None:
        """Unload a model and its callers. `with_members`: also the models that were loaded only for this ensemble."""
        managed = self.models.get(name)
        if managed is None:
            return
        async with managed.lock:
            members = managed.candidate.members if managed.candidate is not None else ()
            managed.forget()
            managed.unload()
        await self._unload_callers(name)
        for member in members if with_members else ():
            if member in self.models and not self.models[member].is_requested and not self._callers([member]):
                await self.unload(member, with_members=True)

    async def remove(self, name: str) -> None:
        """Unload a model whose folder was deleted. The repository is ready without it."""
        if name in self.models and self.models[name].ready:
            self.on_note(f"model '{name}' is unloaded: its folder has gone")
        await self.unload(name)
        self._missing_members.pop(name, None)
        self.managed(name).has_folder = False

    async def _unload_callers(self, name: str) -> None:
        for caller in self._callers([name]):
            # An ensemble that is being loaded over the unloaded model is unloaded as soon as it is there.
            async with caller.lock:
                was_ready = bool(caller.ready)
                if was_ready:
                    caller.unload()
            if was_ready:
                await self._unload_callers(caller.name)

    async def _read(
        self, names: Iterable[str], overrides: LoadOverrides | None = None, *, is_requested: bool = True
    ) -> tuple[Candidates, Failures]:
        """Read models. The caller releases the candidates."""

        def read(name: str) -> ModelReading:
            return read_model(
                self.roots,
                name,
                self.loader.backends,
                is_strict=self.is_strict,
                config_name=self.config_name,
                overrides=overrides,
            )

        run = asyncio.get_running_loop().run_in_executor
        readings: list[ModelReading] = await asyncio.gather(*(run(self.readers, read, name) for name in names))
        candidates: Candidates = {}
        failures: Failures = {}
        for reading in readings:
            if reading.error is not None:
                failures[reading.name] = reading.error
                self._record_failure(reading)
            elif reading.candidate is not None:
                candidates[reading.name] = reading.candidate
                managed = self.managed(reading.name)
                managed.is_requested = managed.is_requested or is_requested
                managed.has_folder = reading.has_folder
        return candidates, failures

    def _record_failure(self, reading: ModelReading) -> None:
        if reading.cause is not None:
            self.failed_loads[reading.name] += 1
            self.managed(reading.name).fail(reading.version, failure_reason(reading.cause))
        if reading.error is not None:
            why = "" if reading.cause or reading.has_folder else ": no repository has a folder of that name"
            self._report(reading.error, why)

    def _report(self, error: SluiceError, why: str = "") -> None:
        self.on_failure(error.message.strip() + why, unexpected_cause(error))
        error.is_logged = True

    async def _load_candidates(self, candidates: Candidates) -> Failures:
        """Load candidates, then the ensembles over what changed. Releases the candidates."""
        try:
            order, circular = load_order(self._graph(candidates))
            failures = {name: ModelFailure(name, reason) for name, reason in circular.items() if name in candidates}
            for name, failure in failures.items():
                self.managed(name).fail(_reported_version(candidates[name]), failure.reason)
                self._report(failure)
            changed, failed = await self._load_in_order([candidates[name] for name in order if name in candidates])
            await self._reload_callers(changed, set(candidates))
            self.failed_loads.update([*failures, *failed])
            return {**failures, **failed}
        finally:
            for candidate in candidates.values():
                self._release(candidate)

    def _graph(self, candidates: Candidates) -> dict[str, Sequence[str]]:
        known = {name: each.candidate for name, each in self.models.items() if each.candidate is not None}
        return {name: candidate.members for name, candidate in {**known, **candidates}.items()}

    async def _with_members(self, candidates: Candidates) -> Candidates:
        """Return the candidates and those of the members that ensembles call and that do not serve."""
        found = dict(candidates)
        while True:
            missing = {
                member
                for candidate in found.values()
                for member in candidate.members
                if member not in found and member not in self.expected and not self._is_serving(member)
            }
            more, _ = await self._read(sorted(missing), is_requested=False)
            if not more:
                return found
            found.update(more)

    def _is_serving(self, name: str, version: int = LATEST) -> bool:
        ready = self.models[name].ready if name in self.models else []
        return any(version in (LATEST, model.version) for model in ready)

    async def _load_in_order(
        self, ordered: Sequence[ModelCandidate], *, is_forced: bool = False
    ) -> tuple[set[str], Failures]:
        """Load candidates concurrently, each after its members. Returns the changed models and what failed."""
        tasks: dict[str, asyncio.Task[bool]] = {}
        for candidate in ordered:
            members = {member: tasks[member] for member in candidate.members if member in tasks}
            tasks[candidate.name] = asyncio.create_task(self._load_after(members, candidate, is_forced))
        results = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        failures: Failures = {}
        for name, result in results.items():
            if isinstance(result, SluiceError):
                failures[name] = result
            elif isinstance(result, BaseException):
                raise result
        return {name for name, result in results.items() if result is True}, failures

    async def _load_after(
        self, members: Mapping[str, asyncio.Task[bool]], candidate: ModelCandidate, is_forced: bool
    ) -> bool:
        results = await asyncio.gather(*members.values(), return_exceptions=True)
        for member in candidate.members:
            if member in self.expected:
                await self.expected[member].wait()
        failed = {name: each for name, each in zip(members, results, strict=True) if isinstance(each, SluiceError)}
        managed = self.managed(candidate.name)
        async with managed.lock:
            managed.plan_to_serve(candidate)
            try:
                self._check_members(candidate, failed)
                is_changed = await managed.apply(candidate, self.loader, is_forced=is_forced)
            except SluiceError as error:
                if isinstance(error, ModelFailure) or managed.ready:
                    managed.fail(_reported_version(candidate), failure_reason(error))
                self._report(error)
                raise
        if is_changed:
            versions = ", ".join(str(each.version) for each in managed.ready)
            _log.info("model '%s' is ready, version %s", candidate.name, versions)
        if is_changed and candidate.notes:
            self.on_note(f"model '{candidate.name}': {'; '.join(candidate.notes)}")
        return is_changed

    def _check_members(self, candidate: ModelCandidate, failed: Failures) -> None:
        """Raise SluiceError where an ensemble would call a model that does not serve."""
        name = candidate.name
        missing = [member for member in candidate.members if not self._is_serving(member)]
        self._missing_members.pop(name, None)
        if missing:
            self._missing_members[name] = frozenset(missing)
        for member in missing:
            if member in failed:
                raise ModelFailure(
                    name,
                    f"ensemble '{name}' depends on '{member}' which has no loaded version. "
                    f"Model '{member}' loading failed with error: {failed[member].message.strip()}",
                )
        if missing:
            listed = ", ".join(missing)
            raise ModelFailure(name, f"ensemble {name} contains models that are not available or ambiguous: {listed}")
        for step in candidate.config.ensemble_scheduling.step:
            if not self._is_serving(step.model_name, step.model_version):
                raise ModelFailure(
                    name,
                    f"ensemble '{name}' depends on '{step.model_name}' whose required version {step.model_version} "
                    "is not loaded.",
                )

    async def _reload_callers(self, changed: set[str], done: set[str]) -> None:
        """Load ensembles again whose members have changed."""
        callers = {
            each.name: each.candidate
            for each in self._callers(changed)
            if each.name not in done and each.candidate is not None
        }
        if callers:
            order, _ = load_order(self._graph(callers))
            ordered = [callers[name] for name in order if name in callers]
            changed, failures = await self._load_in_order(ordered, is_forced=True)
            for name, failure in failures.items():
                await self._withdraw(name, failure_reason(failure))
            await self._reload_callers(changed, done | callers.keys())

    async def _withdraw(self, name: str, reason: str) -> None:
        """Unload an ensemble that does not fit its members any more, until they change again."""
        async with self.models[name].lock:
            self.models[name].unload(reason)
        await self._unload_callers(name)

    def _callers(self, names: Iterable[str]) -> list[ManagedModel]:
        """Return the ensembles that should serve and call any of `names`."""
        called = set(names)
        return [
            each
            for each in self.models.values()
            if each.should_serve and each.candidate is not None and called & set(each.candidate.members)
        ]

    def _release(self, candidate: ModelCandidate) -> None:
        if candidate.folder.release():
            self.drains.start_detached(asyncio.to_thread(candidate.folder.remove))


def _reported_version(candidate: ModelCandidate) -> int:
    """Return the version that the index lists for a model that failed as a whole."""
    return candidate.versions[-1] if candidate.versions else 1
