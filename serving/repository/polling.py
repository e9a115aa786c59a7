"""Poll mode: the repository's folders are looked at again and again, and what has changed is taken up."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from serving.repository.failures import StoreFailure
from serving.repository.poller import Changes, Poller
from serving.repository.roots import Look, Roots
from serving.repository.tasks import Tasks
from serving.repository.updates import Failures, ModelUpdates

_log = logging.getLogger(__name__)

_FIRST_LOOK_REST_S = 1.0
"""How long files must be untouched to be loaded at the start without a second look."""


@dataclass(slots=True)
class Polling:
    """Looks every `poll_s`; loads and unloads go on in `loads` while it looks again."""

    roots: Roots
    readers: Executor
    updates: ModelUpdates
    loads: Tasks
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
        return changes, self.loads.begin(self._follow(changes))

    def _note_problems(self, look: Look) -> None:
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
