"""The listing of a store: its models, and each one's objects with sizes and tags. For threads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec import AbstractFileSystem, available_protocols, get_filesystem_class
from fsspec.core import url_to_fs

from sluice.errors import SluiceError, invalid_argument
from sluice.serving.repository.failures import StoreFailure
from sluice.serving.repository.folders import NEVER_SETTLED, FileState, FolderState, is_plain_name
from sluice.serving.repository.stores.location import StoreLocation
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
