"""What may have to be sent: a file, or a line of one."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cli.rag.client import JsonObject, RagClient
from cli.rag.files import FoundFile, Unread
from pipelines.rag.documents.jsonl import JsonLines, is_jsonl
from pipelines.rag.upload import Upload, hash_content
from sluice.errors import SluiceError

_PIECE_BYTES = 256 << 10


class Candidate(Protocol):
    """A document that the server may lack."""

    @property
    def id(self) -> str: ...

    async def content_hash(self) -> str:
        """As the server works it out. Raises OSError."""
        ...

    async def send(self, client: RagClient, collection: str, force: bool) -> JsonObject:
        """The server's answer. Raises OSError and what the client raises."""
        ...


@dataclass(frozen=True, slots=True)
class WholeFile:
    """Read as it is sent, so that large files need little memory here."""

    id: str
    path: Path

    async def content_hash(self) -> str:
        return await asyncio.to_thread(_file_hash, self.path)

    async def send(self, client: RagClient, collection: str, force: bool) -> JsonObject:
        with _opened(self.path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            return await client.put_document(collection, self.id, _pieces(file, size_bytes), size_bytes, force)


@dataclass(frozen=True, slots=True)
class Line:
    """A document of a file with one a line."""

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


def candidates(found: FoundFile) -> Iterator[Candidate | Unread]:
    """The file, or its lines."""
    if is_jsonl("", found.path.name):
        yield from _lines(found)
    else:
        yield WholeFile(found.id, found.path)


def _lines(found: FoundFile) -> Iterator[Candidate | Unread]:
    try:
        with found.path.open("rb") as file:
            lines = JsonLines(file)
            while True:
                try:
                    yield Line(next(lines))
                except StopIteration:
                    return
                except SluiceError as error:
                    yield Unread(found.id, error.message)
    except OSError as error:
        yield Unread(found.id, error.strerror or str(error))


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(path: Path) -> BinaryIO:
    """At once, not in a thread: one that is cancelled would leave the file open."""
    return path.open("rb")


async def _pieces(file: BinaryIO, size_bytes: int) -> AsyncGenerator[bytes, None]:
    """No more than was announced: a file that grows meanwhile is sent again the next time."""
    left = size_bytes
    while left and (piece := await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))):
        left -= len(piece)
        yield piece
