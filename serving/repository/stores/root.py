"""A root of a model repository in a remote store."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from sluice.serving.repository.failures import StoreFailure
from sluice.serving.repository.folders import FileState, FolderState, ModelFolder, Root
from sluice.serving.repository.stores.listing import StoreListing, failing
from sluice.serving.repository.stores.location import StoreLocation
from sluice.serving.repository.stores.mirror import Download, Downloads, Mirror, Snapshot

_MAX_NAMED = 3
"""Most objects that an error names."""


class StoreRoot(Root):
    """Mirrors each model when it is opened, as a snapshot of one listing.

    An object is up to date where the listings before and after its download agree on it. A model is opened only where
    all of its objects are.
    """

    def __init__(self, location: StoreLocation, cache: Path | None, rest_s: float) -> None:
        """Connect at the first call. `rest_s` is the time between two listings, in which nothing may change."""
        self._location = location
        self._cache = cache
        self._rest_s = rest_s
        self.text = location.text
        self._connection: _Connection | None = None
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()
        self._is_closed = False

    def names(self) -> list[str]:
        return self._connected().listing.names()

    def scan(self) -> Mapping[str, FolderState | None]:
        return self._connected().listing.models()

    def has(self, name: str) -> bool:
        return self._connected().listing.model(name) is not None

    def open(self, name: str) -> ModelFolder | None:
        connection = self._connected()
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            state = connection.listing.model(name)
            if state is None:
                connection.mirror.forget(name)
                return None
            return connection.mirror.current(name, state) or self._mirror(connection, name, state)

    def _mirror(self, connection: "_Connection", name: str, state: FolderState) -> Snapshot:
        """Mirror a model. Raises StoreFailure where any of its objects changes meanwhile."""
        listed_at = time.monotonic()
        with failing(self.text):
            staged, error = connection.download(name, state)
            if error is None:
                connection.downloads.rest(max(0.0, listed_at + self._rest_s - time.monotonic()))
            now = connection.listing.model(name)
            connection.take_in(name, staged, now)
            if error is not None:
                raise error
            if now != state:
                what = f"the objects of {self.location(name)} changed while they were read: {_diff(state, now)}"
                raise StoreFailure(what)
            return connection.mirror.snapshot(name, self.location(name), state)

    def _connected(self) -> "_Connection":
        with self._guard:
            if self._is_closed:
                raise StoreFailure("the server is shutting down")
            if self._connection is None:
                self._connection = _Connection(self._location, self._cache)
            return self._connection

    def stop(self) -> None:
        with self._guard:
            self._is_closed = True
            connection = self._connection
        if connection is not None:
            connection.downloads.stop()

    def close(self) -> None:
        self.stop()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.downloads.close()
            connection.mirror.close()


class _Connection:
    """A connected store: its listing, mirror and downloads."""

    def __init__(self, location: StoreLocation, cache: Path | None) -> None:
        self.listing = StoreListing(location)
        self.mirror = Mirror(location.text, cache)
        self.downloads = Downloads(self.listing.filesystem)

    def download(self, name: str, state: FolderState) -> tuple[dict[FileState, Path], Exception | None]:
        """Download missing objects. Returns the file of each completed one, and the error of the others."""
        files = {self.mirror.staging_file(): file for file in self.mirror.missing(name, state)}
        transfers = [Download(self.listing.path_of(name, file), file.size, path) for path, file in files.items()]
        completed, error = self.downloads.run(name, transfers)
        for path in files.keys() - {each.target for each in completed}:
            path.unlink(missing_ok=True)
        return {files[each.target]: each.target for each in completed}, error

    def take_in(self, name: str, staged: Mapping[FileState, Path], now: FolderState | None) -> None:
        """Keep the downloads that are still listed as they were, so that they need not be repeated."""
        listed = set(now.files) if now is not None else set()
        for file, path in staged.items():
            if file in listed:
                self.mirror.keep(name, file, path)
            else:
                path.unlink()


def _diff(before: FolderState, after: FolderState | None) -> str:
    changed = set(before.files) ^ set(after.files if after is not None else ())
    names = sorted({file.path for file in changed})
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
