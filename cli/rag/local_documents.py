"""Local documents that may have to be sent: files below the given paths, and lines of JSON lines files."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from sluice.cli.errors import CommandError
from sluice.cli.rag.client import LocalContent, RagClient
from sluice.cli.server import JsonObject
from sluice.errors import SluiceError
from sluice.gateway.options.option import USAGE_ERROR
from sluice.pipelines.rag.documents.jsonl import JsonLines, is_jsonl
from sluice.pipelines.rag.types import Upload, hash_content, hashed_fields

_PIECE_BYTES = 256 << 10
_ENDINGS = (".md", ".markdown", ".html", ".htm", ".xhtml", ".pdf", ".txt", ".rst", ".jsonl", ".ndjson")
"""Endings of the files that are ingested if no pattern is given."""


class FilesError(CommandError):
    """Raised for paths that cannot be ingested."""

    code = USAGE_ERROR


# --- files


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file and its document's id."""

    id: str
    path: Path


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file, folder or line that cannot be read, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class FileSelection:
    """Selects files that match one of the patterns, by name or, for a pattern with a slash, by id.

    Without patterns it selects the usual types of documents.
    """

    patterns: Sequence[str] | None

    def includes(self, document_id: str) -> bool:
        name = document_id.rpartition("/")[2]
        if self.patterns is None:
            return name.lower().endswith(_ENDINGS)
        return any(fnmatchcase(document_id if "/" in each else name, each) for each in self.patterns)

    def covers(self, document_id: str) -> bool:
        """Whether a file of this id would be selected if it existed. A line of a file may have any id."""
        return self.patterns is None or self.includes(document_id)


def find_files(paths: Iterable[str], selection: FileSelection) -> list[FoundFile | UnreadableFile]:
    """Find the selected files below `paths`, by id. A path that is itself a file is always included.

    Raises FilesError for a missing path and for two files of one id.
    """
    found: dict[str, FoundFile] = {}
    unreadable: list[UnreadableFile] = []
    for path in map(Path, paths):
        for each in _find_below(path, selection):
            if isinstance(each, UnreadableFile):
                unreadable.append(each)
            elif (other := found.setdefault(each.id, each)) is not each and not other.path.samefile(each.path):
                both = f"{other.path} and {each.path}"
                raise FilesError(f"{both} would both be the document {each.id!r}; give the folder above both of them")
    return [*unreadable, *(found[document_id] for document_id in sorted(found))]


def _find_below(path: Path, selection: FileSelection) -> Iterator[FoundFile | UnreadableFile]:
    if path.is_dir():
        yield from _walk(path, selection)
    elif path.is_file():
        yield _name_document(path.name, path)
    elif path.exists():
        raise FilesError(f"{path} is neither a file nor a folder")
    else:
        raise FilesError(f"{path} is not there")


def _walk(root: Path, selection: FileSelection) -> Iterator[FoundFile | UnreadableFile]:
    """Walk a folder. Follows links to files, but not to folders, which could form cycles."""
    folders = [("", root)]
    while folders:
        prefix, folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    document_id = prefix + entry.name
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((f"{document_id}/", Path(entry.path)))
                    elif selection.includes(document_id) and entry.is_file():
                        yield _name_document(document_id, Path(entry.path))
        except OSError as error:
            yield UnreadableFile(str(folder), error.strerror or str(error))


def _name_document(document_id: str, path: Path) -> FoundFile | UnreadableFile:
    if document_id.isprintable():
        return FoundFile(document_id, path)
    return UnreadableFile(ascii(str(path)), "its name has characters that no id can have")


# --- documents


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A whole file, read while it is sent, so that large files need little memory."""

    id: str
    path: Path
    encoding: str = ""
    """The encoding that the user names, "" for none."""

    async def content_hash(self) -> str:
        """Return the hash that the server computes for the document. Raises OSError."""
        return await asyncio.to_thread(_file_hash, self.path, self.encoding)

    async def send(self, client: RagClient, collection: str, force: bool) -> JsonObject:
        """Send the document and return the server's result. Raises OSError and what the client raises."""
        with _open(self.path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            content = LocalContent(_pieces(file, size_bytes), size_bytes, self.encoding)
            return await client.put_document(collection, self.id, content, force)


@dataclass(frozen=True, slots=True)
class LocalLine:
    """A line of a JSON lines file."""

    upload: Upload

    @property
    def id(self) -> str:
        return self.upload.id

    async def content_hash(self) -> str:
        return hash_content(self.upload)

    async def send(self, client: RagClient, collection: str, force: bool) -> JsonObject:
        upload = self.upload
        fields: dict[str, Any] = {"id": upload.id, "text": upload.content.decode(), "format": upload.format.value}
        if upload.title:
            fields["title"] = upload.title
        if upload.metadata:
            fields["metadata"] = dict(upload.metadata)
        return await client.post_document(collection, fields, force)


LocalDocument = LocalFile | LocalLine
"""A document that may have to be sent."""


def split_file(found: FoundFile, encoding: str = "") -> Iterator[LocalDocument | UnreadableFile]:
    """Yield the file as one document, or the lines of a JSON lines file, which are UTF-8 always."""
    if is_jsonl("", found.path.name):
        yield from _read_lines(found)
    else:
        yield LocalFile(found.id, found.path, encoding)


def _read_lines(found: FoundFile) -> Iterator[LocalDocument | UnreadableFile]:
    try:
        with found.path.open("rb") as file:
            lines = JsonLines(file)
            while True:
                try:
                    yield LocalLine(next(lines))
                except StopIteration:
                    return
                except SluiceError as error:
                    yield UnreadableFile(found.id, error.message)
    except OSError as error:
        yield UnreadableFile(found.id, error.strerror or str(error))


def _file_hash(path: Path, encoding: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(hashed_fields(encoding=encoding))
    return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    """Open a file in the calling thread: a cancelled call in another one would leave the file open."""
    return path.open("rb")


async def _pieces(file: BinaryIO, size_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the announced number of bytes: a file that grows in the meantime is sent again by the next run."""
    left = size_bytes
    while left and (piece := await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))):
        left -= len(piece)
        yield piece
