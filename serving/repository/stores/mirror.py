"""A store's objects as local files: their downloads, a cache of contents, and snapshots of models that link to them.

CACHE/STORE/objects/MODEL/DIGEST      contents by path, size and tag, which need not be downloaded again
CACHE/STORE/staging/                  downloads in progress
CACHE/STORE/snapshots/NUMBER/MODEL/   models that are served; never changed, removed after their last user
"""

import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback

from sluice.errors import invalid_argument
from sluice.run_folder import make_folder
from sluice.serving.repository.failures import StoreFailure
from sluice.serving.repository.folders import FileState, FolderState, ModelFolder

_log = logging.getLogger(__name__)

_NUM_PARALLEL = 8
_LARGE_BYTES = 64_000_000
"""Smaller downloads end before a note on their progress would be of use."""
_NOTE_S = 10.0
"""Interval of progress notes."""
_MB = 1e6


class Snapshot(ModelFolder):
    """A model's folder with the objects of one listing."""

    def __init__(self, path: Path, origin: str, state: FolderState) -> None:
        super().__init__(path)
        self.origin = origin
        self.is_removable = True
        self._state = state

    def state(self) -> FolderState:
        return self._state

    def remove(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)


class Mirror:
    """The cache of one store. For threads; the caller excludes concurrent changes of one model."""

    def __init__(self, text: str, cache: Path | None) -> None:
        """Use the folder `cache`, None for a temporary one. Raises OSError, INVALID where another server uses it."""
        self._temporary = make_folder("store") if cache is None else None
        parent = cache or self._temporary or Path()
        self._folder = parent / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock_cache(self._folder / "lock", text)
        self._staging = self._folder / "staging"
        self._snapshots = self._folder / "snapshots"
        for left_over in (self._staging, self._snapshots):
            shutil.rmtree(left_over, ignore_errors=True)
            left_over.mkdir()
        self._numbers = count(1)
        self._current: dict[str, Snapshot] = {}
        """The newest snapshot of each model, which the mirror uses itself."""
        self._guard = threading.Lock()

    def current(self, name: str, state: FolderState) -> Snapshot | None:
        """Return the model's snapshot for the caller to release, where it has that state; else None."""
        with self._guard:
            snapshot = self._current.get(name)
            if snapshot is None or snapshot.state() != state:
                return None
            snapshot.acquire()
            return snapshot

    def missing(self, name: str, state: FolderState) -> list[FileState]:
        """Return the objects whose contents are not in the cache."""
        return [file for file in state.files if not file.path.endswith("/") and not self._content(name, file).exists()]

    def staging_file(self) -> Path:
        return self._staging / str(next(self._numbers))

    def keep(self, name: str, file: FileState, staged: Path) -> None:
        """Move a downloaded object into the cache, atomically."""
        content = self._content(name, file)
        content.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(content)

    def snapshot(self, name: str, origin: str, state: FolderState) -> Snapshot:
        """Return a snapshot, to be released, of contents in the cache; drop the model's other contents."""
        path = self._snapshots / str(next(self._numbers)) / name
        path.mkdir(parents=True)
        for file in state.files:
            target = path / file.path
            if file.path.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(self._content(name, file), target)
        snapshot = Snapshot(path, origin, state)
        snapshot.acquire()
        self._replace(name, snapshot)
        self._drop_contents(name, {self._content(name, file).name for file in state.files})
        return snapshot

    def forget(self, name: str) -> None:
        """Drop a model that is not in the store any more."""
        self._replace(name, None)
        shutil.rmtree(self._folder / "objects" / name, ignore_errors=True)

    def _replace(self, name: str, snapshot: Snapshot | None) -> None:
        with self._guard:
            old = self._current.pop(name, None)
            if snapshot is not None:
                self._current[name] = snapshot
        if old is not None and old.release():
            old.remove()

    def _drop_contents(self, name: str, used: set[str]) -> None:
        """Remove contents that the model does not use. Snapshots keep their links to them."""
        folder = self._folder / "objects" / name
        for content in folder.iterdir() if folder.exists() else ():
            if content.name not in used:
                content.unlink()

    def _content(self, name: str, file: FileState) -> Path:
        identity = f"{file.path}\0{file.size}\0{file.tag}"
        return self._folder / "objects" / name / hashlib.sha256(identity.encode()).hexdigest()

    def close(self) -> None:
        """Remove all but the contents, which the next server can use. No model may be served from it any more."""
        for folder in (self._staging, self._snapshots):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(self._lock_file)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _lock_cache(path: Path, text: str) -> int:
    """Lock a cache. Returns a file descriptor, whose close releases the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        message = f"another server mirrors {text} into {path.parent.parent}; give each server a cache of its own"
        raise invalid_argument(message) from None
    return file


@dataclass(frozen=True, slots=True)
class Download:
    """The download of one object: its path in the store, its expected size, and the file to write."""

    source: str
    size: int
    target: Path


@dataclass(slots=True)
class DownloadProgress:
    """Progress of one model's download. Large models get a note at the start and every ten seconds."""

    name: str
    total_bytes: int
    note: Callable[[str], None] = _log.info
    clock: Callable[[], float] = time.monotonic
    _num_bytes: int = 0
    _noted_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._noted_at = self.clock()
        if self.total_bytes >= _LARGE_BYTES:
            self.note(f"model '{self.name}': downloading {self.total_bytes / _MB:.0f} MB")

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            now = self.clock()
            is_due = self.total_bytes >= _LARGE_BYTES and now - self._noted_at >= _NOTE_S
            if is_due:
                self._noted_at = now
        if is_due:
            done, total = self._num_bytes / _MB, self.total_bytes / _MB
            self.note(f"model '{self.name}': {done:.0f} of {total:.0f} MB downloaded")


class Downloads:
    """Downloads from one store. `run` is for threads."""

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._filesystem = filesystem
        self._is_closing = threading.Event()
        self._pool = ThreadPoolExecutor(_NUM_PARALLEL, thread_name_prefix="sluice-store")

    def run(self, name: str, transfers: Sequence[Download]) -> tuple[list[Download], Exception | None]:
        """Download in parallel; the first error ends the others. Returns the completed ones and the error."""
        progress = DownloadProgress(name, sum(each.size for each in transfers))
        running = {self._pool.submit(self._run, each, progress): each for each in transfers}
        _, pending = wait(running, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        wait(pending)
        errors = {future: future.exception() for future in running if not future.cancelled()}
        completed = [running[future] for future, error in errors.items() if error is None]
        return completed, next((error for error in errors.values() if isinstance(error, Exception)), None)

    def _run(self, transfer: Download, progress: DownloadProgress) -> None:
        num_bytes = 0

        def count(size: int, value: int, **_: Any) -> None:
            nonlocal num_bytes
            if self._is_closing.is_set():
                raise StoreFailure("the server is shutting down")
            progress.add(value - num_bytes)
            num_bytes = value

        count(0, 0)
        self._filesystem.get_file(transfer.source, str(transfer.target), callback=Callback(hooks={"count": count}))
        size = transfer.target.stat().st_size
        if size != transfer.size:
            raise StoreFailure(f"object {transfer.source} has {size} bytes and was listed with {transfer.size}")

    def rest(self, duration_s: float) -> None:
        """Wait for `duration_s`. Raises StoreFailure where the server shuts down meanwhile."""
        if self._is_closing.wait(duration_s):
            raise StoreFailure("the server is shutting down")

    def stop(self) -> None:
        """Let running downloads end soon, and start no more."""
        self._is_closing.set()

    def close(self) -> None:
        """Wait until no download is running."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)
