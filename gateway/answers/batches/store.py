"""The folder of a server's files and batches: contents as files, everything else in one store in a SQLite file."""

import asyncio
import os
import time
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.batches.records import BATCH_PURPOSE, UNFINISHED, Batch, FileRecord, new_id
from sluice.state.calendar_clock import CalendarClock
from sluice.state.changes import change
from sluice.state.connections import FileLimits, Schema
from sluice.state.interface import Key, Put, Record
from sluice.state.outage import StoreUse
from sluice.state.sqlite import RECORDS, FileLayout, StoreInFile

T = TypeVar("T")

MAX_UNFINISHED = 100
"""Most batches that are not finished."""
MAX_FINISHED = 10_000
"""Most batches that are kept after their end."""
_FILES, _UNFINISHED, _FINISHED = "files", "unfinished", "batches"
"""The shelves of the store. A batch moves to the last one at its end."""
_TOTALS = Key("state", "totals")
"""The record that every change replaces, so that none is made of what another has changed meanwhile."""
_PART = ".part"
"""End of the names of uploads that are not whole."""
_ABANDONED_S = 86_400.0
"""Age from which a file that the store does not know is what a process left that was killed."""
_WRITE_BYTES = 1 << 20
_STATES = ", ".join(f"'{status}'" for status in UNFINISHED)
_NUMBERED = "CAST(json_set(CAST(record AS TEXT), '$.number', number) AS BLOB) AS body"
_OLD_BATCHES = f"SELECT id, status, {_NUMBERED} FROM batches"
_OLD_TOTALS = (
    "SELECT CAST(json_object('num_bytes', (SELECT coalesce(sum(num_bytes), 0) FROM files), 'number', "
    "(SELECT coalesce(max(number), 0) FROM files) + (SELECT coalesce(max(number), 0) FROM batches)"
    ") AS BLOB) AS body"
)
_MOVE = "INSERT INTO records SELECT {}, 1, 0, 9e999, length(body), body FROM ({});"
SCHEMA = Schema(
    0x536C7362,
    (
        """
        CREATE TABLE files (
            number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
            purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL
        ) STRICT;
        CREATE TABLE batches (
            number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
            status TEXT NOT NULL, input_file_id TEXT NOT NULL, record BLOB NOT NULL
        ) STRICT;
        """,
        f"""
        {RECORDS}
        {_MOVE.format(f"'{_FILES}', id", f"SELECT id, {_NUMBERED} FROM files")}
        {_MOVE.format(f"iif(status IN ({_STATES}), '{_UNFINISHED}', '{_FINISHED}'), id", _OLD_BATCHES)}
        {_MOVE.format(f"'{_TOTALS.shelf}', '{_TOTALS.name}'", _OLD_TOTALS)}
        DROP TABLE files; DROP TABLE batches
        """,
    ),
)
"""The header's mark is "Slsb"."""
_LAYOUT = FileLayout("--state-path {0.parent}", SCHEMA, FileLimits(num_readers=2))
_encode = msgspec.json.Encoder().encode
_decode_file = msgspec.json.Decoder(FileRecord).decode
_decode_batch = msgspec.json.Decoder(Batch).decode
IsListed = Callable[["_Head"], bool]


class Page(NamedTuple):
    """The part of a list with at most `limit` entries after that of the id `after`, newest first unless
    `is_ascending`."""

    limit: int
    after: str = ""
    is_ascending: bool = False

    def of(self, kind: str, found: Mapping[str, Record], owner: str, is_listed: IsListed) -> list[bytes]:
        """Return its entries of the owner's, and one more where there are more. Raises INVALID where `after` is none of
        them. For threads: there may be thousands."""
        own = [head for each in found.values() if (head := _decode_head(each.body)).owner == owner]
        own.sort(key=lambda each: each.number, reverse=not self.is_ascending)
        start = next((n for n, each in enumerate(own, 1) if each.id == self.after), 0)
        if self.after and not start:
            raise invalid("after", f"after must be the id of one of the {kind}, got {self.after[:80]!r}")
        return [found[each.id].body for each in islice(filter(is_listed, own[start:]), self.limit + 1)]


class _Head(msgspec.Struct, frozen=True, gc=False):
    """The part of a file or a batch by which it is listed: to decode thousands as a whole would hold up other
    threads."""

    id: str
    owner: str
    number: int = 0
    endpoint: str = ""
    purpose: str = ""
    expires_at: int | None = None


class _Totals(msgspec.Struct, frozen=True):
    """The number of the last file or batch, and the bytes of all files."""

    number: int = 0
    num_bytes: int = 0


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_totals = msgspec.json.Decoder(_Totals).decode


class _Change:
    """Changes that are made together."""

    def __init__(self, totals: _Totals) -> None:
        self.totals = totals
        self.puts: list[Put] = []

    def add_file(self, record: FileRecord) -> None:
        number = self._count(record.num_bytes)
        self.puts.append(Put(Key(_FILES, record.id), _encode(msgspec.structs.replace(record, number=number))))

    def delete_file(self, record: FileRecord) -> None:
        self.totals = msgspec.structs.replace(self.totals, num_bytes=self.totals.num_bytes - record.num_bytes)
        self.puts.append(Put(Key(_FILES, record.id), None))

    def add_batch(self, batch: Batch) -> None:
        self.put_batch(msgspec.structs.replace(batch, number=self._count(0)))

    def put_batch(self, batch: Batch) -> None:
        """Put a batch on its shelf, and take it from the one where it was before its end."""
        is_finished = batch.status not in UNFINISHED
        self.puts.append(Put(Key(_FINISHED if is_finished else _UNFINISHED, batch.id), _encode(batch)))
        if is_finished:
            self.puts.append(Put(Key(_UNFINISHED, batch.id), None))

    def _count(self, num_bytes: int) -> int:
        self.totals = _Totals(self.totals.number + 1, self.totals.num_bytes + num_bytes)
        return self.totals.number


class StateStore:
    """Files and batches of all owners in one folder, which is created at the first use. Servers may share it.

    Every method runs in a thread what touches the disk. Each raises UNAVAILABLE where the folder cannot be used.
    """

    def __init__(self, folder: Path, max_stored_bytes: int, max_file_bytes: int) -> None:
        self.folder = folder
        self._max_stored_bytes = max_stored_bytes
        self._max_file_bytes = max_file_bytes
        self._database = folder / "state.sqlite"
        self._records = StoreInFile(self._database, _LAYOUT)
        self._changing = asyncio.Lock()
        """Changes of this server wait for each other; one of another server makes them begin anew."""
        self._contents = StoreUse(self._try_upload)
        self._calendar = CalendarClock()
        """Says what is too old to be kept."""

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored."""
        return self._database.exists()

    def problem(self) -> str:
        """Return why the folder could not be used the last time; "" where it could."""
        return self._records.problem() or self._contents.problem()

    async def _try_upload(self) -> None:
        async with self.new_upload() as upload:
            await upload.write(bytes(_WRITE_BYTES))

    async def close(self) -> None:
        self._contents.close()
        await self._records.close()

    async def _transact(self, decide: Callable[[_Change], Awaitable[T]]) -> T:
        """Make the changes that `decide` adds, all or none. It is called again where another change was made since it
        began, so that what it has read is in force. Raises what it raises."""

        async def decide_all(totals: bytes | None) -> tuple[T, list[Put]]:
            changes = _Change(_Totals() if totals is None else _decode_totals(totals))
            result = await decide(changes)
            return result, [*changes.puts, Put(_TOTALS, _encode(changes.totals))]

        async with self._changing:
            return await change(self._records, _TOTALS, decide_all)

    # -- files

    def path(self, file_id: str) -> Path:
        """Return where the contents of a file lie."""
        return self.folder / "files" / file_id

    def new_upload(self) -> "FileUpload":
        return FileUpload(self.path(new_id("file-")), self._max_file_bytes, self._contents)

    async def add_file(self, record: FileRecord) -> None:
        """Add a file whose contents are in place; they are deleted where it is refused. Raises TOO_LARGE where the
        stored files are too large together."""

        async def decide(changes: _Change) -> None:
            stored = changes.totals.num_bytes
            if stored + record.num_bytes > self._max_stored_bytes:
                raise SluiceError(
                    ErrorCode.TOO_LARGE,
                    f"file has {record.num_bytes} bytes and the stored files have {stored}; together they may have "
                    f"{self._max_stored_bytes} (--max-stored-files-size): delete some first",
                    param="file",
                )
            changes.add_file(record)

        try:
            await self._transact(decide)
        except SluiceError:
            await self._delete_contents([record.id])
            raise

    async def file(self, owner: str, file_id: str) -> FileRecord:
        """Return the owner's file. Raises NOT_FOUND, also for one that has expired."""
        found = await self._records.get(Key(_FILES, file_id))
        record = None if found is None else _decode_file(found.body)
        if record is None or record.owner != owner or not record.is_kept(_now()):
            raise SluiceError(ErrorCode.NOT_FOUND, f"No such File object: {file_id[:80]!r}", param="file_id")
        return record

    async def files(self, owner: str, purpose: str, page: Page) -> list[FileRecord]:
        """Return a page of the owner's files, and one more where there are more; "" is any purpose. Raises INVALID."""
        now = _now()

        def is_listed(head: _Head) -> bool:
            return purpose in ("", head.purpose) and (head.expires_at is None or head.expires_at >= now)

        return await self._page(page, "files", (_FILES,), owner, is_listed, _decode_file)

    async def _page(
        self,
        page: Page,
        kind: str,
        shelves: Sequence[str],
        owner: str,
        is_listed: IsListed,
        decode: Callable[[bytes], T],
    ) -> list[T]:
        scans = [await self._records.scan(shelf) for shelf in shelves]

        def pick() -> list[T]:
            found = dict(ChainMap(*scans[::-1]))
            return [decode(each) for each in page.of(kind, found, owner, is_listed)]

        return await asyncio.to_thread(pick)

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete the owner's file. Raises NOT_FOUND, and INVALID for one that a batch reads."""

        async def decide(changes: _Change) -> None:
            record = await self.file(owner, file_id)
            for batch in await self.unfinished():
                if batch.input_file_id == file_id:
                    message = f"file {file_id} is the input of {batch.id}, which is {batch.status}"
                    raise invalid("file_id", f"{message}; cancel the batch first")
            changes.delete_file(record)

        await self._transact(decide)
        await self._delete_contents([file_id])

    async def sweep(self) -> None:
        """Delete files that have expired, those that killed processes left, and the oldest batches of too many.

        A file that a batch reads stays until its end.
        """
        now = self._calendar()

        async def decide(changes: _Change) -> tuple[list[str], set[str]]:
            files, finished = await self._records.scan(_FILES), await self._records.scan(_FINISHED)
            unfinished = await self.unfinished()
            read = {each.input_file_id for each in unfinished}
            written = {file_id for each in unfinished for file_id in (each.output_id, each.errors_id)}

            def choose() -> list[str]:
                records = [_decode_file(each.body) for each in files.values()]
                expired = [each for each in records if not each.is_kept(int(now)) and each.id not in read]
                for record in expired:
                    changes.delete_file(record)
                heads = [_decode_head(each.body) for each in finished.values()]
                for batch in sorted(heads, key=lambda each: -each.number)[MAX_FINISHED:]:
                    changes.puts.append(Put(Key(_FINISHED, batch.id), None))
                return [each.id for each in expired]

            return await asyncio.to_thread(choose), written | files.keys()

        expired, known = await self._transact(decide)
        await self._delete_contents(expired)
        await asyncio.to_thread(self._delete_unknown, known, now - _ABANDONED_S)

    def _delete_unknown(self, known: set[str], oldest: float) -> None:
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.folder / "files"):
                if entry.name not in known and entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)

    async def _delete_contents(self, file_ids: Sequence[str]) -> None:
        for file_id in file_ids:
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    # -- batches

    async def add_batch(self, batch: Batch) -> None:
        """Add a batch. Raises INVALID for its input file, OVERLOADED for too many unfinished batches."""

        async def decide(changes: _Change) -> None:
            try:
                file = await self.file(batch.owner, batch.input_file_id)
            except SluiceError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                raise invalid("input_file_id", f"input_file_id: {error.message}") from None
            if file.purpose != BATCH_PURPOSE:
                message = f"input_file_id must be a file whose purpose is 'batch', got {file.id}, whose is"
                raise invalid("input_file_id", f"{message} {file.purpose!r}")
            if (num_unfinished := len(await self._records.scan(_UNFINISHED))) >= MAX_UNFINISHED:
                message = f"{num_unfinished} batches are unfinished, and there may be {MAX_UNFINISHED}"
                raise SluiceError(ErrorCode.OVERLOADED, f"{message}; send this one again later", retry_after_s=60.0)
            changes.add_batch(batch)

        await self._transact(decide)

    async def batch(self, owner: str | None, batch_id: str) -> Batch:
        """Return the owner's batch, None for anybody's. Raises NOT_FOUND."""
        # In this order: a batch that ends between the two looks is on the second shelf.
        found = await self._records.get(Key(_UNFINISHED, batch_id)) or await self._records.get(Key(_FINISHED, batch_id))
        batch = None if found is None else _decode_batch(found.body)
        if batch is None or owner not in (None, batch.owner):
            raise SluiceError(ErrorCode.NOT_FOUND, f"No batch found with id {batch_id[:80]!r}", param="batch_id")
        return batch

    async def batches(self, owner: str, page: Page, endpoint: str = "") -> list[Batch]:
        """Return a page of the owner's batches, and one more where there are more; "" is any endpoint. Raises
        INVALID."""
        # In this order: a batch that ends between the two looks is on the second shelf.
        shelves = _UNFINISHED, _FINISHED
        return await self._page(
            page, "batches", shelves, owner, lambda head: endpoint in ("", head.endpoint), _decode_batch
        )

    async def delete_batch(self, owner: str, batch_id: str) -> None:
        """Delete a batch of the owner with its files. Raises NOT_FOUND, and INVALID for one that is not over."""

        async def decide(changes: _Change) -> list[str]:
            batch = await self.batch(owner, batch_id)
            if batch.status in UNFINISHED:
                message = f"batch {batch_id} is {batch.status}; cancel it first, and delete it when it has ended"
                raise invalid("batch_id", message)
            changes.puts.append(Put(Key(_FINISHED, batch_id), None))
            deleted = []
            for file_id in (batch.input_file_id, batch.output_id, batch.errors_id):
                if (found := await self._records.get(Key(_FILES, file_id))) is not None:
                    changes.delete_file(_decode_file(found.body))
                    deleted.append(file_id)
            return deleted

        await self._delete_contents(await self._transact(decide))

    async def unfinished(self) -> list[Batch]:
        """Return everybody's unfinished batches, the oldest first."""
        found = await self._records.scan(_UNFINISHED)
        batches = await asyncio.to_thread(lambda: [_decode_batch(each.body) for each in found.values()])
        return sorted(batches, key=lambda each: each.number)

    async def change(
        self,
        batch_id: str,
        replace: Callable[[Batch], Batch],
        owner: str | None = None,
        outputs: Sequence[FileRecord] = (),
    ) -> Batch:
        """Replace a batch by what `replace` returns for it, and add the files of its results, which are not there yet.

        Raises NOT_FOUND, and what `replace` raises.
        """

        async def decide(changes: _Change) -> Batch:
            batch = replace(await self.batch(owner, batch_id))
            changes.put_batch(batch)
            for record in outputs:
                changes.add_file(record)
            return batch

        return await self._transact(decide)


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
