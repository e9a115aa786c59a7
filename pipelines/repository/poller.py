"""What has changed in the repository's folders since they were last looked at, and has come to rest.

A folder that is being copied changes from look to look: only what two looks in a row saw the same is taken up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.repository.folders import FolderState, folder_state, model_names

Look = Mapping[str, tuple[tuple[Path, FolderState], ...]]
"""Every model's folders (one, unless several roots have it) as they were at one moment."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What to do about a look. `is_resting`: nothing was in motion."""

    changed: tuple[str, ...]
    removed: tuple[str, ...]
    is_resting: bool


class Poller:
    """Remembers the last look, and what was taken up: whatever `take` has returned."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._last: Look = {}
        self._taken: dict[str, tuple[tuple[Path, FolderState], ...]] = {}

    def look(self) -> Look:
        """Read the folders, for a thread. One that changes under the look is not in it: it was in motion."""
        found = {}
        for name, folders in model_names(self._roots).items():
            try:
                found[name] = tuple((folder, folder_state(folder)) for folder in folders)
            except OSError:
                found[name] = ()
        return found

    def take(self, now: Look, settled_before_ns: int = 0, busy: Collection[str] = ()) -> Changes:
        """What came to rest since the last look and is not taken up yet, but for those that are `busy`.

        `settled_before_ns` is in time.time_ns: what no file has touched since then is at rest at the first look.
        """
        changed = []
        is_resting = True
        for name, folders in now.items():
            if self._taken.get(name) == folders and folders:
                continue
            is_old = all(state.changed_ns < settled_before_ns for _, state in folders)
            if folders and name not in busy and (is_old or self._last.get(name) == folders):
                changed.append(name)
                self._taken[name] = folders
            else:
                is_resting = False
        removed = [name for name in self._taken if name not in now and name not in busy]
        for name in removed:
            del self._taken[name]
        self._last = now
        return Changes(tuple(changed), tuple(removed), is_resting)
