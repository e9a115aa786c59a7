"""Finds the files that are to be documents."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cli.rag.failures import FilesError

TAKEN = (".md", ".markdown", ".html", ".htm", ".xhtml", ".pdf", ".txt", ".rst", ".jsonl", ".ndjson")
"""Endings of files that are documents where nobody says which are."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, and the id of the document that it is."""

    id: str
    path: Path


@dataclass(frozen=True, slots=True)
class Unread:
    """What was found and cannot be read, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files are taken: those that match one of the patterns, by name or (with a slash in it) by id."""

    patterns: Sequence[str] | None

    def takes(self, document_id: str) -> bool:
        name = document_id.rpartition("/")[2]
        if self.patterns is None:
            return name.lower().endswith(TAKEN)
        return any(fnmatchcase(document_id if "/" in each else name, each) for each in self.patterns)

    def covers(self, document_id: str) -> bool:
        """Whether a document of that id would be found if its file were there; a line of a file has any id."""
        return self.patterns is None or self.takes(document_id)


def find_files(paths: Iterable[str], selection: Selection) -> list[FoundFile | Unread]:
    """What is to be taken, by id. A path that is a file is taken whatever it is called.

    Raises FilesError for a path that is not there, and for two files of one id.
    """
    found: dict[str, FoundFile] = {}
    unread: list[Unread] = []
    for path in map(Path, paths):
        for each in _below(path, selection):
            if isinstance(each, Unread):
                unread.append(each)
            elif (other := found.setdefault(each.id, each)) is not each and not _is_same(other.path, each.path):
                both = f"{other.path} and {each.path}"
                raise FilesError(f"{both} would both be the document {each.id!r}; give the folder above both of them")
    return [*unread, *(found[document_id] for document_id in sorted(found))]


def _below(path: Path, selection: Selection) -> Iterator[FoundFile | Unread]:
    if path.is_dir():
        yield from _walk(path, selection)
    elif path.is_file():
        yield _named(path.name, path)
    elif path.exists():
        raise FilesError(f"{path} is neither a file nor a folder")
    else:
        raise FilesError(f"{path} is not there")


def _walk(root: Path, selection: Selection) -> Iterator[FoundFile | Unread]:
    """Folders are not followed through links, so that there is no way round in circles; files are."""
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
                    elif selection.takes(document_id) and entry.is_file():
                        yield _named(document_id, Path(entry.path))
        except OSError as error:
            yield Unread(str(folder), error.strerror or str(error))


def _named(document_id: str, path: Path) -> FoundFile | Unread:
    if document_id.isprintable():
        return FoundFile(document_id, path)
    return Unread(ascii(str(path)), "its name has characters that no id can have")


def _is_same(one: Path, other: Path) -> bool:
    return one.samefile(other)
