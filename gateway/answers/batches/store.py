"""The folder of a server's files and batches: contents as files, everything else in one SQLite file."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.batches import tables
from sluice.gateway.answers.batches.records import Batch, FileRecord, new_id
from sluice.gateway.answers.batches.tables import Page
from sluice.state.calendar_clock import CalendarClock
from sluice.state.connections import FileConnections, FileLimits
from sluice.state.outage import StoreUse

_PART = ".part"
"""End of the names of uploads that are not whole."""
_ABANDONED_S = 86_400.0
"""Age from which a file that no table has is what a process left that was killed."""
_WRITE_BYTES = 1 << 20


class StateStore:
    """Files and batches of all owners in one folder, which is created at the first use. Servers may share it.

    Every method runs in a thread what touches the disk. Each raises UNAVAILABLE where the folder cannot be used.
    """

    def __init__(self, folder: Path, max_stored_bytes: int, max_file_bytes: int) -> None:
        self.folder = folder
        self._max_stored_bytes = max_stored_bytes
        self._max_file_bytes = max_file_bytes
        self._database = folder / "state.sqlite"
        limits = FileLimits(num_readers=2)
        self._connections = FileConnections(self._database, f"--state-path {folder}", tables.SCHEMA, limits)
        self._connections.start()
        self._contents = StoreUse(self._try_upload)
        self._calendar = CalendarClock()
        """Says what is too old to be kept."""

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored."""
        return self._database.exists()

    def problem(self) -> str:
        """Return why the folder could not be used the last time; "" where it could."""
        return self._connections.problem() or self._contents.problem()

    async def _try_upload(self) -> None:
        async with self.new_upload() as upload:
            await upload.write(bytes(_WRITE_BYTES))

    async def close(self) -> None:
        self._contents.close()
        await self._connections.close()

    # -- files

    def path(self, file_id: str) -> Path:
        """Return where the contents of a file lie."""
        return self.folder / "files" / file_id

    def new_upload(self) -> "FileUpload":
        return FileUpload(self.path(new_id("file-")), self._max_file_bytes, self._contents)

    async def add_file(self, record: FileRecord) -> None:
        """Add a file whose contents are in place; they are deleted where it is refused. Raises TOO_LARGE."""
        try:
            await self._connections.write(tables.add_file, record, self._max_stored_bytes)
        except SluiceError:
            await asyncio.to_thread(self.path(record.id).unlink, missing_ok=True)
            raise

    async def file(self, owner: str, file_id: str) -> FileRecord:
        """Return the owner's file. Raises NOT_FOUND."""
        return await self._connections.read(tables.read_file, owner, file_id, _now())

    async def files(self, owner: str, purpose: str, page: Page) -> list[FileRecord]:
        """Return a page of the owner's files, and one more where there are more; "" is any purpose. Raises INVALID."""
        return await self._connections.read(tables.list_files, owner, purpose, page, _now())

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete the owner's file. Raises NOT_FOUND, and INVALID for one that a batch reads."""
        await self._connections.write(tables.delete_file, owner, file_id, _now())
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def sweep(self) -> None:
        """Delete the files that have expired, and what processes left that were killed."""
        for file_id in await self._connections.write(tables.delete_expired_files, int(now := self._calendar())):
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)
        known = await self._connections.read(tables.known_files)
        await asyncio.to_thread(self._delete_unknown, known, now - _ABANDONED_S)

    def _delete_unknown(self, known: set[str], oldest: float) -> None:
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.folder / "files"):
                if entry.name not in known and entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)

    # -- batches

    async def add_batch(self, batch: Batch) -> None:
        """Add a batch. Raises INVALID for its input file, OVERLOADED for too many unfinished batches."""
        await self._connections.write(tables.add_batch, batch, _now())

    async def batch(self, owner: str, batch_id: str) -> Batch:
        """Return the owner's batch. Raises NOT_FOUND."""
        return await self._connections.read(tables.read_batch, batch_id, owner)

    async def batches(self, owner: str, page: Page, endpoint: str = "") -> list[Batch]:
        """Return a page of the owner's batches, and one more where there are more; "" is any endpoint. Raises
        INVALID."""
        return await self._connections.read(tables.list_batches, owner, page, endpoint)

    async def delete_batch(self, owner: str, batch_id: str) -> None:
        """Delete a batch of the owner with its files. Raises NOT_FOUND, and INVALID for one that is not over."""
        for file_id in await self._connections.write(tables.delete_batch, owner, batch_id):
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def unfinished(self) -> list[Batch]:
        """Return everybody's unfinished batches, the oldest first."""
        return await self._connections.read(tables.unfinished_batches)

    async def change(
        self,
        batch_id: str,
        change: Callable[[Batch], Batch],
        owner: str | None = None,
        outputs: Iterable[FileRecord] = (),
    ) -> Batch:
        """Replace a batch by what `change` returns for it, and add the files of its results. Raises NOT_FOUND, and what
        `change` raises."""
        return await self._connections.write(tables.change_batch, batch_id, change, owner, outputs)


class FileUpload:
    """A file that arrives in pieces. Used as a context: what is not kept by its end is deleted. Raises UNAVAILABLE
    where the disk takes it no longer."""

    def __init__(self, path: Path, max_bytes: int, contents: StoreUse) -> None:
        """`contents` notes whether the disk takes files."""
        self.id = path.name
        self.num_bytes = 0
        self._path = path
        self._part = path.with_suffix(_PART)
        self._max_bytes = max_bytes
        self._contents = contents
        self._pending = bytearray()
        self._file = -1

    async def __aenter__(self) -> Self:
        return self

    async def write(self, piece: bytes) -> None:
        """Append a piece. Raises TOO_LARGE."""
        self.num_bytes += len(piece)
        if self.num_bytes > self._max_bytes:
            message = f"file may have at most {self._max_bytes} bytes (--max-file-size)"
            raise SluiceError(ErrorCode.TOO_LARGE, message, param="file")
        self._pending += piece
        if len(self._pending) >= _WRITE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        pending, self._pending = self._pending, bytearray()
        with self._contents.note("write"):
            await self._run(lambda: self._write(pending))

    def _write(self, text: bytearray) -> None:
        if self._file < 0:
            self._part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    async def keep(self) -> None:
        """Put the whole file in its place, on the disk."""
        await self._flush()
        with self._contents.note("write"):
            await self._run(self._keep)

    def _keep(self) -> None:
        os.fsync(self._file)
        self._part.rename(self._path)

    async def _run(self, work: Callable[[], None]) -> None:
        """Run `work` on a thread. A call that is cancelled ends with it, so that only one works on the file."""
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait((running,))
            raise
        except OSError as error:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"the file cannot be stored: {error.strerror}") from error

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._run(self._end)

    def _end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._part.unlink(missing_ok=True)


def _now() -> int:
    return int(time.time())
