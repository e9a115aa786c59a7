"""Folders that go with their process: sockets, unpacked archives, copies of models. Nothing of them is left behind.

A process has one folder `sluice-run-...` for all of them, and holds a lock on it for as long as it lives. It removes
the folder when it ends. What a killed process leaves is removed by the next one that makes such a folder, which finds
the lock free. Process ids are no proof of anything, since the kernel gives them out again.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from sluice.errors import ErrorCode, SluiceError

_PREFIX = "sluice-run-"
_SOCKET_PATH_BYTES = 107
"""The longest path of a socket in Linux."""
_SOCKET_NAME_BYTES = len("/engine-9999.new")
"""Bytes that the longest name in a folder of sockets takes."""


class _RunFolder:
    """The folder of this process in one folder for temporary files."""

    def __init__(self, parent: Path) -> None:
        """Raises OSError."""
        self._pid = os.getpid()
        self._numbers = count(1)
        self.path, self._lock = _make_locked(parent)

    def is_usable(self) -> bool:
        """Return whether the folder exists and belongs to this process, not to the one that it was forked from."""
        return self._pid == os.getpid() and self.path.is_dir()

    def make(self, kind: str) -> Path:
        path = self.path / f"{kind}-{next(self._numbers)}"
        path.mkdir(mode=0o700)
        return path

    def remove(self) -> None:
        if self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Another process may take a folder that is not locked yet for one that a killed process has left.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    return path, lock
            os.close(lock)


_guard = threading.Lock()
_folders: dict[Path, _RunFolder] = {}
"""Run folders by the folder for temporary files, which tests change. Changed under `_guard`."""


def make_folder(kind: str) -> Path:
    """Make a folder that only this user can access. Its user removes it, else the end of this process does.

    Raises UNAVAILABLE where no temporary file can be written.
    """
    try:
        parent = Path(tempfile.gettempdir())
        with _guard:
            found = _folders.get(parent)
            if found is None or not found.is_usable():
                remove_left_over(parent)
                found = _folders[parent] = _RunFolder(parent)
            return found.make(kind)
    except OSError as error:
        message = f"no temporary folder can be made: {error}; set TMPDIR to a folder with room that may be written"
        raise SluiceError(ErrorCode.UNAVAILABLE, message) from None


def make_socket_folder(kind: str) -> Path:
    """Make a folder for sockets, as `make_folder` does. Raises UNAVAILABLE also where their paths would be too long."""
    folder = make_folder(kind)
    num_bytes = len(os.fsencode(folder)) + _SOCKET_NAME_BYTES
    if num_bytes <= _SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()
    most = len(os.fsencode(tempfile.gettempdir())) - (num_bytes - _SOCKET_PATH_BYTES)
    message = (
        f"the path {tempfile.gettempdir()} is too long for sockets in it; set TMPDIR to one of at most {most} bytes"
    )
    raise SluiceError(ErrorCode.UNAVAILABLE, message)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Make a folder for the context's duration. Raises UNAVAILABLE as `make_folder` does."""
    folder = make_folder(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def remove_all() -> None:
    """Remove the folders of this process, which is about to end."""
    for folder in _folders.values():
        folder.remove()


def remove_left_over(parent: Path | None = None) -> None:
    """Remove the folders of this user's processes that have ended, by default among this process's temporary files."""
    with suppress(OSError):
        for path in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_unlocked(path)


def _remove_if_unlocked(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError where its process lives
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
