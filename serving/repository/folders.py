"""Folders of a repository: roots, models, numbered versions, and the state of files. Reads files: for threads."""

import os
import re
import shutil
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import invalid_argument
from sluice.run_folder import make_folder
from sluice.serving.spec import inner_path

_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_MAX_DEPTH = 16
"""Levels below a model's folder that are scanned. Anything deeper is a loop of links."""
_BYTE_CODE_FOLDER = "__pycache__"
_NO_MODELS = frozenset(("lost+found", _BYTE_CODE_FOLDER))
NEVER_SETTLED = 2**63 - 1
"""A time of change that is unknown: only a second scan shows whether anything changed."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file, which differs after a change. `path` is relative to the model's folder, with slashes.

    A folder's path ends in a slash. `tag` is a remote store's tag of an object's content, in place of a time.
    """

    path: str
    size: int
    modified_ns: int = 0
    tag: str = ""


@dataclass(frozen=True, slots=True)
class FolderState:
    """The state of a model's folder at one scan. Byte code is left out: importing a model writes it."""

    files: tuple[FileState, ...]
    changed_ns: int
    """Time of the last change of any file in it. Unlike a modification time, a copy cannot set it."""

    def of_version(self, version: int) -> tuple[FileState, ...]:
        """Return the files of a version: those in its folder, and those beside the numbered folders."""
        return tuple(each for each in self.files if _owner(each.path) in (None, version))


def _owner(path: str) -> int | None:
    first, slash, _ = path.partition("/")
    return int(first) if slash and _VERSION.fullmatch(first) else None


def is_plain_name(name: str) -> bool:
    """Return whether `name` can name a model's folder in a repository, and nothing outside of it.

    Hidden folders, and those that a file system or Python makes, are no models.
    """
    return bool(name) and not name.startswith(".") and name not in _NO_MODELS and not set(name) & {"/", "\\", "\0"}


def list_versions(folder: Path) -> list[int]:
    """Return the numbers of the version folders, ascending."""
    with os.scandir(folder) as entries:
        return sorted(int(each.name) for each in entries if _VERSION.fullmatch(each.name) and each.is_dir())


def scan_folder(folder: Path) -> FolderState:
    """Return the state of every file below `folder`. Raises OSError where something vanishes meanwhile."""
    files = sorted(_walk_files(folder, "", 0), key=lambda each: each[0].path)
    return FolderState(tuple(file for file, _ in files), max((changed_ns for _, changed_ns in files), default=0))


def _walk_files(folder: Path, prefix: str, depth: int) -> Iterator[tuple[FileState, int]]:
    """Yield each file's state, and the time of its last change of any kind."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == _BYTE_CODE_FOLDER:
                continue
            path = prefix + entry.name
            try:
                status = entry.stat()
            except FileNotFoundError:  # a dangling link, or a file deleted meanwhile: another scan will tell
                yield FileState(path, 0, 0), 0
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield FileState(path, status.st_size, status.st_mtime_ns), status.st_ctime_ns
            elif depth < _MAX_DEPTH:
                yield from _walk_files(Path(entry.path), f"{path}/", depth + 1)


class ModelFolder:
    """A model's folder, counted by its users. The folder of a load request is removed after its last user.

    The caller that is given it releases it, on any thread.
    """

    def __init__(self, path: Path, *, is_temporary: bool = False) -> None:
        self.path = path
        self.origin = str(path)
        """Identifies the folder; equal for two folders of which one replaces the other."""
        self.is_temporary = is_temporary
        self.is_removable = is_temporary
        """Whether it is removed after its last user."""
        self._num_users = 1
        self._lock = threading.Lock()

    def state(self) -> FolderState:
        """Return its present state. Raises OSError where something vanishes meanwhile."""
        return scan_folder(self.path)

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1

    def release(self) -> bool:
        """Count one user less. Returns whether the caller must `remove` the folder, on a thread."""
        with self._lock:
            self._num_users -= 1
            return self.is_removable and self._num_users == 0

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def write_files(files: Iterable[tuple[str, bytes]]) -> ModelFolder:
    """Return a new temporary folder with these files. Raises INVALID for a path that leads out of it."""
    files = [(inner_path(path), content) for path, content in files]
    folder = ModelFolder(make_folder("model"), is_temporary=True)
    try:
        for path, content in files:
            target = folder.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except OSError as error:
        folder.remove()
        raise invalid_argument(f"cannot write the files of the request: {error}") from None
    return folder


class Root(ABC):
    """One root of a repository. Methods raise OSError or StoreFailure where it cannot be read now."""

    text: str
    """The path or URL as it was given."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of its models' folders, without hidden ones."""

    @abstractmethod
    def scan(self) -> Mapping[str, FolderState | None]:
        """Return the state of every model's folder; None for one that changed during the scan."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether it has a model of that unqualified name."""

    @abstractmethod
    def open(self, name: str) -> ModelFolder | None:
        """Return the model's folder as it is now, for the caller to release; None where there is none."""

    def location(self, name: str) -> str:
        """Return a model's location, for messages."""
        return f"{self.text.rstrip('/')}/{name}"

    def stop(self) -> None:  # noqa: B027 - a hook that most leave empty
        """Let calls in flight on other threads end soon, with an error."""

    def close(self) -> None:  # noqa: B027
        """Free its connections and files. No call may be in flight, and no model served from it."""


class LocalRoot(Root):
    """A root in the local file system."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = str(path)

    def names(self) -> list[str]:
        with os.scandir(self._path) as entries:
            return [entry.name for entry in entries if is_plain_name(entry.name) and _is_folder(entry)]

    def scan(self) -> dict[str, FolderState | None]:
        return {name: _try_scan(self._path / name) for name in self.names()}

    def has(self, name: str) -> bool:
        return os.path.isdir(self._path / name)

    def open(self, name: str) -> ModelFolder | None:
        return ModelFolder(self._path / name) if self.has(name) else None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or through an unreadable folder
        return False


def _try_scan(folder: Path) -> FolderState | None:
    try:
        return scan_folder(folder)
    except OSError:
        return None
