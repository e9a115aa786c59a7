"""Objects become files: several at a time, with a note on how far large models are."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback

from serving.repository.failures import StoreFailure

_log = logging.getLogger(__name__)

_NUM_PARALLEL = 8
_LARGE_BYTES = 64_000_000
"""Models of which less is to be downloaded are there before anybody asks how far they are."""
_NOTE_S = 10.0
"""Between two notes."""
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Transfer:
    """One object: what the store calls it, how large it is to be, and the file that it becomes."""

    source: str
    size: int
    target: Path


@dataclass(slots=True)
class Progress:
    """How far the download of one model is: a note at the start and every ten seconds, for large models only."""

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
        """So many more are here."""
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
    """All of one store. `run` is for threads."""

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._filesystem = filesystem
        self._is_closing = threading.Event()
        self._pool = ThreadPoolExecutor(_NUM_PARALLEL, thread_name_prefix="sluice-store")

    def run(self, name: str, transfers: Sequence[Transfer]) -> tuple[list[Transfer], Exception | None]:
        """Download them side by side. The first error ends the others.

        Returns, once nothing runs any more, those that are whole, and the error.
        """
        progress = Progress(name, sum(each.size for each in transfers))
        running = {self._pool.submit(self._run, each, progress): each for each in transfers}
        _, pending = wait(running, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        wait(pending)
        errors = {future: future.exception() for future in running if not future.cancelled()}
        whole = [running[future] for future, error in errors.items() if error is None]
        return whole, next((error for error in errors.values() if isinstance(error, Exception)), None)

    def _run(self, transfer: Transfer, progress: Progress) -> None:
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
        """Wait that long. Raises StoreFailure where it all ends meanwhile."""
        if self._is_closing.wait(duration_s):
            raise StoreFailure("the server is shutting down")

    def stop(self) -> None:
        """Let what is under way end soon, and begin nothing."""
        self._is_closing.set()

    def close(self) -> None:
        """Wait until nothing is under way."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)
