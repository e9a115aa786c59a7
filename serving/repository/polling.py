"""Poll mode: the repository's folders are looked at again and again, and what has changed is taken up."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from serving.repository.failures import StoreFailure
from serving.repository.folders import FolderState
from serving.repository.loader import BackgroundTasks
from serving.repository.roots import RepositoryScan, Roots, States
from serving.repository.updates import Failures, ModelUpdates


@dataclass(frozen=True, slots=True)
class Changes:
    """What to do about a look. `changed`: the models' folders as they are to be taken up, one each where there is one.

    `is_resting`: nothing was in motion.
    """

    changed: dict[str, FolderState | None]
    removed: tuple[str, ...]
    is_resting: bool


class Poller:
    """Remembers the last look, and what was taken up: whatever `take` has returned."""

    def __init__(self) -> None:
        self._last = RepositoryScan()
        self._taken: dict[str, States] = {}

    def take(self, now: RepositoryScan, settled_before_ns: int = 0, busy: Collection[str] = ()) -> Changes:
        """What came to rest since the last look and is not taken up yet, but for those that are `busy`.

        `settled_before_ns` is in time.time_ns: what no file has touched since then is at rest at the first look.
        """
        changed: dict[str, FolderState | None] = {}
        is_resting = True
        for name, states in now.models.items():
            if self._taken.get(name) == states and _is_seen(states):
                continue
            is_settled = _is_older(states, settled_before_ns) or self._last.models.get(name) == states
            if _is_seen(states) and name not in busy and is_settled:
                changed[name] = states[0][1]
                self._taken[name] = states
            else:
                is_resting = False
        removed = [name for name in self._taken if name not in now.models and name not in busy]
        for name in removed:
            del self._taken[name]
        self._last = now
        return Changes(changed, tuple(removed), is_resting)

    def give_back(self, name: str) -> None:
        """It could not be taken up for now: the next look that sees it takes it up again."""
        self._taken.pop(name, None)


def _is_seen(states: States) -> bool:
    return all(state is not None for _, state in states)


def _is_older(states: States, time_ns: int) -> bool:
    return all(state is not None and state.changed_ns < time_ns for _, state in states)


_log = logging.getLogger(__name__)

_FIRST_LOOK_REST_S = 1.0
"""How long files must be untouched to be loaded at the start without a second look."""


@dataclass(slots=True)
class Polling:
    """Looks every `poll_s`; loads and unloads go on in `loads` while it looks again."""

    roots: Roots
    readers: Executor
    updates: ModelUpdates
    loads: BackgroundTasks
    poll_s: float
    on_note: Callable[[str], None]
    _poller: Poller = field(default_factory=Poller)
    _changing: set[str] = field(default_factory=set)
    """What a look has found and is being loaded or unloaded."""
    _problems: Mapping[str, str] = field(default_factory=dict)
    """Why the last look did not see some roots."""
    _choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names that several models shared at the last look."""

    async def begin(self) -> Failures:
        """Load what lies still. What does not has a second to come to rest; later, the next look will take it up."""
        rest_s = min(self.poll_s, _FIRST_LOOK_REST_S)
        changes, work = await self._take_up(time.time_ns() - int(rest_s * 1e9))
        failures = await work
        if not changes.is_resting:
            await asyncio.sleep(rest_s)
            changes, work = await self._take_up()
            again = await work
            failures = {name: each for name, each in failures.items() if name not in changes.changed} | again
        return failures

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(self.poll_s)
            try:
                await self._take_up()
            except Exception as error:
                # Whatever went wrong with this look, the next one may go well.
                _log.debug("a look at the model repository failed", exc_info=error)
                self.on_note(f"the model repository cannot be read: {type(error).__name__}: {error}")

    async def _take_up(self, settled_before_ns: int = 0) -> tuple[Changes, asyncio.Task[Failures]]:
        """Look, and begin to load and unload accordingly. A model that is at it is looked at when it is done."""
        look = await asyncio.get_running_loop().run_in_executor(self.readers, self.roots.look)
        self._note_problems(look)
        self._follow_names()
        changes = self._poller.take(look, settled_before_ns, self._changing)
        return changes, self.loads.start(self._follow(changes))

    def _note_problems(self, look: RepositoryScan) -> None:
        for root, problem in look.problems.items():
            if self._problems.get(root) != problem:
                self.on_note(f"the model repository {root} cannot be read, its models serve as they are: {problem}")
        for root in self._problems.keys() - look.problems.keys():
            self.on_note(f"the model repository {root} can be read again")
        self._problems = look.problems

    def _follow_names(self) -> None:
        """Where models have other names now, read again what the names in ensembles stand for."""
        choices = self.roots.naming.choices
        if choices != self._choices:
            for name in self.updates.ensembles():
                self._poller.give_back(name)
        self._choices = choices

    async def _follow(self, changes: Changes) -> Failures:
        names = {*changes.changed, *changes.removed}
        self._changing |= names
        try:
            for name in changes.removed:
                await self.updates.remove(name)
            failures = await self.updates.load_seen(changes.changed)
            again = [name for name, failure in failures.items() if isinstance(failure, StoreFailure)]
            again += self.updates.waiting_for(changes.changed.keys() - failures.keys())
            for name in again:
                self._poller.give_back(name)
            return failures
        finally:
            self._changing -= names
