"""Poll mode: the repository's folders are scanned at intervals, and changed models are loaded or unloaded.

A folder that is being copied differs from scan to scan, so a change counts once two scans in a row agree.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from sluice.serving.repository.failures import StoreFailure
from sluice.serving.repository.folders import FolderState
from sluice.serving.repository.loader import BackgroundTasks
from sluice.serving.repository.roots import FolderStates, RepositoryScan, Roots, plain_name
from sluice.serving.repository.updates import Failures, ModelUpdates

_log = logging.getLogger(__name__)

_FIRST_SCAN_REST_S = 1.0
"""Files untouched for this long are loaded at the start without a second scan."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes since an earlier scan: `changed` has the new folder state of each model to load, where it has one folder.

    `is_settled`: nothing is changing any more.
    """

    changed: dict[str, FolderState | None]
    removed: tuple[str, ...]
    is_settled: bool


class ChangeDetector:
    """Compares scans. It remembers the last one, and every state that `take` has returned."""

    def __init__(self) -> None:
        self._last = RepositoryScan()
        self._returned: dict[str, FolderStates] = {}

    def take(self, now: RepositoryScan, settled_before_ns: int = 0, busy: Collection[str] = ()) -> Changes:
        """Return the settled changes that were not returned yet, except of models that are `busy`.

        A folder is settled once two scans in a row agree, under whatever name of the model, or where nothing in it has
        changed since `settled_before_ns` (time.time_ns).
        """
        seen = {*self._last.models.values()}
        changed: dict[str, FolderState | None] = {}
        is_settled = True
        for name, states in now.models.items():
            if self._returned.get(name) == states and _is_readable(states):
                continue
            is_stable = _is_older(states, settled_before_ns) or states in seen
            if _is_readable(states) and name not in busy and is_stable:
                changed[name] = states[0][1]
                self._returned[name] = states
            else:
                is_settled = False
        gone = [name for name in self._returned if name not in now.models and name not in busy]
        # A model that only has another name now serves under the old one until its new one is settled.
        awaited = {plain_name(name) for name in now.models if name not in self._returned}
        removed = [name for name in gone if plain_name(name) not in awaited]
        for name in removed:
            del self._returned[name]
        self._last = now
        return Changes(changed, tuple(removed), is_settled and len(removed) == len(gone))

    def restore(self, name: str) -> None:
        """Return the removed model as removed again at the next scan."""
        self._returned[name] = ()

    def settled(self, name: str) -> dict[str, FolderState | None]:
        """Return the state that `take` returned last for a model, by its name, unless it was forgotten."""
        return {name: states[0][1]} if (states := self._returned.get(name)) else {}

    def forget(self, name: str) -> None:
        """Return the model's state again at the next scan."""
        self._returned.pop(name, None)


def _is_readable(states: FolderStates) -> bool:
    return all(state is not None for _, state in states)


def _is_older(states: FolderStates, time_ns: int) -> bool:
    return all(state is not None and state.changed_ns < time_ns for _, state in states)


@dataclass(slots=True)
class RepositoryPoller:
    """Scans at the start and every `poll_s` seconds, unless that is 0. Loads and unloads go on in `loads` meanwhile."""

    roots: Roots
    readers: Executor
    updates: ModelUpdates
    loads: BackgroundTasks
    poll_s: float
    on_note: Callable[[str], None]
    _detector: ChangeDetector = field(default_factory=ChangeDetector)
    _changing: set[str] = field(default_factory=set)
    """Models that are being loaded or unloaded after a scan."""
    _deferred: set[str] = field(default_factory=set)
    """Models whose removal is left to the next scan."""
    _problems: Mapping[str, str] = field(default_factory=dict)
    """Reasons for which the last scan could not read roots."""
    _choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names that several models shared at the last scan."""

    async def start(self) -> Failures:
        """Load the settled models. The others have a second to settle; after that they are left to later scans."""
        rest_s = min(self.poll_s or _FIRST_SCAN_REST_S, _FIRST_SCAN_REST_S)
        changes, work = await self._scan(time.time_ns() - int(rest_s * 1e9))
        failures = await work
        if not changes.is_settled:
            await asyncio.sleep(rest_s)
            changes, work = await self._scan()
            again = await work
            failures = {name: each for name, each in failures.items() if name not in changes.changed} | again
        return failures

    async def run(self) -> None:
        """Scan for ever, unless there is no interval."""
        while self.poll_s:
            await asyncio.sleep(self.poll_s)
            try:
                await self._scan()
            except Exception as error:
                # Whatever went wrong with this scan, the next one may succeed.
                _log.debug("a scan of the model repository failed", exc_info=error)
                self.on_note(f"the model repository cannot be read: {type(error).__name__}: {error}")

    async def _scan(self, settled_before_ns: int = 0) -> tuple[Changes, asyncio.Task[Failures]]:
        """Scan, and start to load and unload accordingly. Models that are still busy wait for a later scan."""
        scan = await asyncio.get_running_loop().run_in_executor(self.readers, self.roots.scan)
        self._note_problems(scan)
        self._recheck_ensembles()
        changes = self._detector.take(scan, settled_before_ns, self._changing)
        return changes, self.loads.start(self._apply(changes))

    def _note_problems(self, scan: RepositoryScan) -> None:
        for root, problem in scan.problems.items():
            if self._problems.get(root) != problem:
                self.on_note(f"the model repository {root} cannot be read, its models serve as they are: {problem}")
        for root in self._problems.keys() - scan.problems.keys():
            self.on_note(f"the model repository {root} can be read again")
        self._problems = scan.problems

    def _recheck_ensembles(self) -> None:
        """Read ensembles again where models have other names now, as the names of their steps may have changed."""
        choices = self.roots.naming.choices
        if choices != self._choices:
            for name in self.updates.ensembles():
                self._detector.forget(name)
        self._choices = choices

    async def _apply(self, changes: Changes) -> Failures:
        names = {*changes.changed, *changes.removed}
        self._changing |= names
        try:
            self._deferred -= changes.changed.keys()
            plain = set(map(plain_name, changes.changed))
            renamed = [name for name in changes.removed if plain_name(name) in plain or name in self._deferred]
            for name in changes.removed:
                if name not in renamed:
                    await self.updates.remove(name)
            failures = await self.updates.load_settled(changes.changed)
            # At once, so that the steps of ensembles have new names before the models go that had the old ones.
            failures |= await self._load_waiting(changes.changed.keys() - failures.keys(), names)
            for name in renamed:
                await self._remove_renamed(name)
            for name, failure in failures.items():
                if isinstance(failure, StoreFailure):
                    self._detector.forget(name)
            return failures
        finally:
            self._changing -= names

    async def _remove_renamed(self, name: str) -> None:
        """Remove a model that serves under another name. While ensembles call it by this one, that is left to later.

        Those that have been loaded again since, and call it still, do not have it longer than until the next scan.
        """
        callers = self.updates.callers(name)
        if any(map(self._is_pending, callers)) or (callers and name not in self._deferred):
            self._deferred.add(name)
            self._detector.restore(name)
            return
        self._deferred.discard(name)
        await self.updates.remove(name)

    def _is_pending(self, name: str) -> bool:
        """Return whether a model is being loaded after another scan, or will be after a later one."""
        return name in self._changing or not self._detector.settled(name)

    async def _load_waiting(self, loaded: Collection[str], changing: set[str]) -> Failures:
        """Load the ensembles whose last load missed any of `loaded`, and add them to those that are `changing`."""
        states: dict[str, FolderState | None] = {}
        for name in self.updates.waiting_for(loaded):
            if name in changing or name not in self._changing:
                states |= self._detector.settled(name)
            else:
                self._detector.forget(name)
        changing |= states.keys()
        self._changing |= states.keys()
        return await self.updates.load_settled(states)
