"""A root of a model repository in a remote store, and its listing: models, and the objects of each. For threads."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem, available_protocols, get_filesystem_class
from fsspec.core import url_to_fs

from sluice.errors import SluiceError, invalid_argument
from sluice.serving.repository.failures import StoreFailure
from sluice.serving.repository.folders import NEVER_SETTLED, FileState, FolderState, ModelFolder, Root, is_plain_name
from sluice.serving.repository.stores.location import StoreLocation
from sluice.serving.repository.stores.mirror import Download, Downloads, Mirror, Snapshot
from sluice.serving.spec import inner_path

_CONTENT_TAGS = ("ETag", "etag", "md5Hash", "md5", "generation", "VersionId")
"""Keys under which fsspec's filesystems give a tag of an object's content. The first one found is used."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
"""Keys for the time of an object's last change, used where there is no tag."""
_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Sluice's extras with the libraries of protocols."""


class StoreListing:
    """Lists the repository at a location. Methods raise StoreFailure where the store does not answer or refuses."""

    def __init__(self, location: StoreLocation) -> None:
        """Raise INVALID for a protocol without an installed library."""
        self._text = location.text
        self.filesystem, path = _open(location)
        self._path = str(path).strip("/")
        self._prefix = "/" if str(path).startswith("/") else ""

    def names(self) -> list[str]:
        with failing(self._text):
            self.filesystem.invalidate_cache()
            try:
                entries = self.filesystem.ls(self._prefix + self._path, detail=True)
            except FileNotFoundError:
                # A store has no empty folders: an absent folder has no models, unless the bucket itself is absent.
                entries = list(self._find(self._path).values())
        found = (self._relative(each["name"]) for each in entries if _is_folder(each))
        return sorted({name for name in found if _is_model(name)})

    def models(self) -> dict[str, FolderState]:
        with failing(self._text):
            found = self._find(self._path)
        objects: dict[str, list[FileState]] = {}
        for entry in found.values():
            name, slash, path = self._relative(entry["name"], keeps_end=True).partition("/")
            is_inside = _is_model(name) and (slash or _is_folder(entry))
            if is_inside:
                objects.setdefault(name, []).extend(_states(path, entry))
        return {name: _folder_state(files) for name, files in objects.items()}

    def model(self, name: str) -> FolderState | None:
        """Return the state of one model; None where it has no objects."""
        with failing(self._text):
            found = self._find(f"{self._path}/{name}")
        objects: list[FileState] = []
        for entry in found.values():
            own, slash, path = self._relative(entry["name"], keeps_end=True).partition("/")
            if own == name and (slash or _is_folder(entry)):
                objects.extend(_states(path, entry))
        return _folder_state(objects) if found and _is_model(name) else None

    def path_of(self, name: str, file: FileState) -> str:
        """Return the store's path of a model's object."""
        return f"{self._prefix}{self._path}/{name}/{file.path}"

    def _find(self, path: str) -> Mapping[str, Any]:
        self.filesystem.invalidate_cache()
        found: Mapping[str, Any] = self.filesystem.find(self._prefix + path, withdirs=True, detail=True)
        return found

    def _relative(self, path: str, *, keeps_end: bool = False) -> str:
        """Return `path` relative to the repository. `keeps_end` keeps a final slash, which marks an empty folder."""
        inner = path.lstrip("/").removeprefix(self._path).lstrip("/")
        return inner if keeps_end else inner.rstrip("/")


def _open(location: StoreLocation) -> tuple[AbstractFileSystem, str]:
    protocol = location.protocol
    if protocol not in available_protocols():
        raise _unreadable(location, f"nothing here reads {protocol}://")
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise _unreadable(location, f"pip install 'sluice[{extra}]'" if extra else str(error)) from None
    with failing(location.text):
        # Every scan must see what is there now, and no other part of the process shares this connection.
        opened: tuple[AbstractFileSystem, str] = url_to_fs(
            location.url, use_listings_cache=False, skip_instance_cache=True, **location.options
        )
        return opened


def _unreadable(location: StoreLocation, reason: str) -> SluiceError:
    return invalid_argument(f"the model repository {location.text} cannot be read: {reason}")


@contextmanager
def failing(text: str) -> Iterator[None]:
    """Raise any error of a filesystem's library as a failure of the store `text`."""
    try:
        yield
    except SluiceError:
        raise
    except Exception as error:
        raise StoreFailure(f"the store {text} cannot be read: {type(error).__name__}: {error}") from error


def _is_folder(entry: Mapping[str, Any]) -> bool:
    return bool(entry["type"] == "directory" or entry["name"].endswith("/"))


def _is_model(name: str) -> bool:
    return is_plain_name(name)


def _states(path: str, entry: Mapping[str, Any]) -> list[FileState]:
    """Return an object's state; nothing for the model's own folder. A folder's path ends in a slash."""
    if not path.strip("/") or "__pycache__" in path.split("/"):
        return []
    try:
        inner = inner_path(path.rstrip("/"))
    except SluiceError as error:
        raise StoreFailure(f"object {entry['name']}: {error.message}") from None
    if _is_folder(entry):
        return [FileState(f"{inner}/", 0)]
    return [FileState(inner, int(entry.get("size") or 0), tag=_tag(entry))]


def _tag(entry: Mapping[str, Any]) -> str:
    for key in _CONTENT_TAGS + _TIMES:
        if entry.get(key) is not None:
            return str(entry[key])
    return ""


def _folder_state(files: list[FileState]) -> FolderState:
    unique = {file.path: file for file in files}
    return FolderState(tuple(unique[path] for path in sorted(unique)), NEVER_SETTLED)


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
