"""What lies in a model repository: models' folders, their numbered versions, and the files with sizes and times.

Everything here reads the file system and is for threads.
"""

import os
import re
import shutil
import stat
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.spec import inner_path
from sluice.errors import ErrorCode, SluiceError

_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_MAX_DEPTH = 16
"""Levels below a model's folder that are looked at: what goes deeper is a loop of links."""
_BYTE_CODE_FOLDER = "__pycache__"


NEVER_AT_REST = 2**63 - 1
"""The time of a change that nothing tells: only a second look shows whether there was one."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as a change of it shows. `path` is relative to the model's folder, with slashes; a folder's ends in one.

    `tag` is what a remote store says of an object's content, in place of a time.
    """

    path: str
    size: int
    modified_ns: int = 0
    tag: str = ""


@dataclass(frozen=True, slots=True)
class FolderState:
    """A model's folder at one look. Byte code is left out: importing a model writes it."""

    files: tuple[FileState, ...]
    changed_ns: int
    """When the youngest file came to be here or was last written; unlike a modification time no copy can set it."""

    def of_version(self, version: int) -> tuple[FileState, ...]:
        """What the version is made of: its own folder, and what lies beside the numbered ones."""
        return tuple(each for each in self.files if _owner(each.path) in (None, version))


def _owner(path: str) -> int | None:
    first, slash, _ = path.partition("/")
    return int(first) if slash and _VERSION.fullmatch(first) else None


def is_plain_name(name: str) -> bool:
    """Whether `name` can name a folder in a repository and nothing outside of it."""
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}


def versions_in(folder: Path) -> list[int]:
    """The numbered version folders, ascending; no number, no version."""
    with os.scandir(folder) as entries:
        return sorted(int(each.name) for each in entries if _VERSION.fullmatch(each.name) and each.is_dir())


def folder_state(folder: Path) -> FolderState:
    """Every file below `folder` as it is now. Raises OSError where something vanishes meanwhile."""
    files = sorted(_walk(folder, "", 0), key=lambda each: each[0].path)
    return FolderState(tuple(file for file, _ in files), max((changed_ns for _, changed_ns in files), default=0))


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[FileState, int]]:
    """Each file, and when it was last changed in whatever way."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == _BYTE_CODE_FOLDER:
                continue
            path = prefix + entry.name
            try:
                status = entry.stat()
            except FileNotFoundError:  # a link to nowhere, or gone since: another look will tell
                yield FileState(path, 0, 0), 0
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield FileState(path, status.st_size, status.st_mtime_ns), status.st_ctime_ns
            elif depth < _MAX_DEPTH:
                yield from _walk(Path(entry.path), f"{path}/", depth + 1)


class ModelFolder:
    """Where a model's files lie. One made for a load request is removed when its last holder has let go.

    Who was given it holds it until he lets go; any thread may.
    """

    def __init__(self, path: Path, *, is_temporary: bool = False) -> None:
        self.path = path
        self.is_temporary = is_temporary
        self._num_holders = 1
        self._lock = threading.Lock()

    @property
    def origin(self) -> str:
        """What it is: the same for two folders of which one takes the other's place."""
        return str(self.path)

    @property
    def is_removable(self) -> bool:
        """Whether it goes with its last holder."""
        return self.is_temporary

    def state(self) -> FolderState:
        """As it is now, for a thread. Raises OSError where something vanishes meanwhile."""
        return folder_state(self.path)

    def hold(self) -> None:
        with self._lock:
            self._num_holders += 1

    def let_go(self) -> bool:
        """Whether that was the last holder of a folder that nobody needs then: `remove` it, on a thread."""
        with self._lock:
            self._num_holders -= 1
            return self.is_removable and self._num_holders == 0

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def write_files(files: Iterable[tuple[str, bytes]]) -> ModelFolder:
    """A new temporary folder with these files. Raises SluiceError INVALID for a path that leads out of it."""
    files = [(inner_path(path), content) for path, content in files]
    folder = ModelFolder(Path(tempfile.mkdtemp(prefix="sluice-model-")), is_temporary=True)
    try:
        for path, content in files:
            target = folder.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except OSError as error:
        folder.remove()
        raise SluiceError(ErrorCode.INVALID, f"cannot write the files of the request: {error}") from None
    return folder


class Root(ABC):
    """One model repository. Methods raise OSError or StoreFailure where it cannot be read now."""

    text: str
    """As it was given."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of its models' folders. Hidden ones are none."""

    @abstractmethod
    def look(self) -> Mapping[str, FolderState | None]:
        """Every model's folder as it is now; None for one that changed under the look."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether it has a model of that plain name."""

    @abstractmethod
    def open(self, name: str) -> ModelFolder | None:
        """The model's folder as it is now, held for the caller; None where there is none."""

    def place(self, name: str) -> str:
        """Where a model lies, for messages."""
        return f"{self.text.rstrip('/')}/{name}"

    def stop(self) -> None:  # noqa: B027 - a hook that most leave empty
        """Let what is under way on other threads end soon, with an error."""

    def close(self) -> None:  # noqa: B027
        """Free what it holds. Nothing may be under way, nor served from it."""


class LocalRoot(Root):
    """A folder of folders."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = str(path)

    def names(self) -> list[str]:
        with os.scandir(self._path) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]

    def look(self) -> dict[str, FolderState | None]:
        return {name: _state(self._path / name) for name in self.names()}

    def has(self, name: str) -> bool:
        return os.path.isdir(self._path / name)

    def open(self, name: str) -> ModelFolder | None:
        return ModelFolder(self._path / name) if self.has(name) else None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or through what may not be read
        return False


def _state(folder: Path) -> FolderState | None:
    try:
        return folder_state(folder)
    except OSError:
        return None
