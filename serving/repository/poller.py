"""What has changed in the repository's folders since they were last looked at, and has come to rest.

A folder that is being copied changes from look to look: only what two looks in a row saw the same is taken up.
"""

from collections.abc import Collection
from dataclasses import dataclass

from serving.repository.folders import FolderState
from serving.repository.roots import Look, States


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
        self._last = Look()
        self._taken: dict[str, States] = {}

    def take(self, now: Look, settled_before_ns: int = 0, busy: Collection[str] = ()) -> Changes:
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
