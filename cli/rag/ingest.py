"""`sluice rag ingest`: brings a collection up to date with local files, and shows the progress."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console

from sluice.cli.progress import show_progress
from sluice.cli.rag.arguments import Arguments
from sluice.cli.rag.client import (
    BrokenConnectionError,
    RagClient,
    RagError,
    RejectedRequestError,
    UnreachableError,
)
from sluice.cli.rag.local_documents import (
    FileSelection,
    FoundFile,
    LocalDocument,
    UnreadableFile,
    find_files,
    split_file,
)
from sluice.cli.server import JsonObject
from sluice.cli.terminal import strip_control
from sluice.gateway.options.option import FAILED

T = TypeVar("T")

_NOT_FOUND = 404


async def ingest(client: RagClient, arguments: Arguments) -> int:
    """Send new and changed documents, report what was done, and return the exit code."""
    own = arguments.of_command
    options = IngestionOptions(
        own["collection"],
        FileSelection(own["include"]),
        own["jobs"],
        own["prune"],
        own["force"],
        own["dry_run"],
        own["encoding"] or "",
    )
    found = await asyncio.to_thread(find_files, own["paths"], options.selection)
    if not found:
        sys.stderr.write("sluice rag ingest: no documents found; --include takes files of other types\n")
    ingestion = Ingestion(client, options, RetryPolicy())
    try:
        async with show_progress(ingestion.progress, Console(stderr=True, soft_wrap=True)):
            await ingestion.run(found)
    except (RagError, asyncio.CancelledError):
        _report(ingestion.progress, options)
        sys.stderr.write("sluice rag ingest: stopped; the same command goes on from here\n")
        raise
    _report(ingestion.progress, options)
    return FAILED if ingestion.progress.failures else 0


def _report(progress: "IngestionProgress", options: "IngestionOptions") -> None:
    for name, reason in progress.failures:
        sys.stderr.write(f"failed: {strip_control(name)}: {strip_control(reason)}\n")
    dry = " (dry run: nothing was changed)" if options.is_dry else ""
    sys.stdout.write(f"{options.collection}: {progress.summary()}{dry}\n")


@dataclass(frozen=True, slots=True)
class IngestionOptions:
    """Options of an ingestion. `num_jobs` uploads run at once; with `is_dry`, changes are shown and not made.

    `encoding` is that of files that are not UTF-8, "" where they declare it or are none.
    """

    collection: str
    selection: FileSelection
    num_jobs: int = 4
    prunes: bool = False
    forces: bool = False
    is_dry: bool = False
    encoding: str = ""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds to wait after each failure if the server does not say how long. Their number is that of the retries."""

    waits_s: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)
    longest_wait_s: float = 60.0
    """Longest wait that the server may ask for, in seconds."""


class Ingestion:
    """Runs an ingestion: sends documents that the server lacks and deletes those whose files are gone.

    `progress` is valid at any time, also after a run that ended early.
    """

    def __init__(self, client: RagClient, options: IngestionOptions, policy: RetryPolicy) -> None:
        self.progress = IngestionProgress()
        self._client = client
        self._options = options
        self._policy = policy
        self._seen: set[str] = set()

    async def run(self, found: Sequence[FoundFile | UnreadableFile]) -> None:
        """Ingest the files. Raises RagError if the server cannot go on; documents sent by then stay."""
        self.progress.num_planned = len(found)
        known = await self._known_hashes()
        documents = self._documents(found)

        async def work() -> None:
            for document in documents:
                await self._ingest(document, known)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.num_jobs):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if self._options.prunes:
            await self._prune(known)

    async def _known_hashes(self) -> dict[str, str]:
        """Return the content hashes of the server's documents by id."""
        try:
            return {each["id"]: each["content_hash"] async for each in self._client.documents(self._options.collection)}
        except RejectedRequestError as error:
            if error.status != _NOT_FOUND:
                raise
            return {}  # the first document creates the collection

    def _documents(self, found: Sequence[FoundFile | UnreadableFile]) -> Iterator[LocalDocument]:
        for each in found:
            parts = [each] if isinstance(each, UnreadableFile) else split_file(each, self._options.encoding)
            for number, part in enumerate(parts):
                self.progress.num_planned += number > 0
                if isinstance(part, UnreadableFile):
                    self.progress.has_unreadable = True
                    self.progress.fail(part.name, part.reason)
                elif part.id in self._seen:
                    # Sent concurrently, either could win, and the other would be sent again by the next run.
                    self.progress.fail(part.id, "a document of this id came before it, and is kept")
                else:
                    self._seen.add(part.id)
                    yield part

    async def _ingest(self, document: LocalDocument, known: Mapping[str, str]) -> None:
        try:
            if not self._options.forces and known.get(document.id) == await document.content_hash():
                self.progress.count("unchanged")
            elif self._options.is_dry:
                self._show("update" if document.id in known else "create", document.id)
                self.progress.count("updated" if document.id in known else "created")
            else:
                await self._send(document)
        except OSError as error:
            self.progress.fail(document.id, error.strerror or str(error))
        except RejectedRequestError as error:
            if not error.is_document_error:
                raise
            self.progress.fail(document.id, str(error))

    async def _send(self, document: LocalDocument) -> None:
        try:
            result = await self._send_with_retries(document)
        except BrokenConnectionError:
            await retry_request(self._client.collections, self._policy)  # raises if the server does not come back
            try:
                result = await self._send_with_retries(document)
            except BrokenConnectionError as error:
                self.progress.fail(document.id, f"{error}; is it more than the server's --http-max-input-size?")
                return
        self.progress.count(result["status"], 0 if result["status"] == "unchanged" else result["num_chunks"])

    async def _send_with_retries(self, document: LocalDocument) -> JsonObject:
        options = self._options
        return await retry_request(
            lambda: document.send(self._client, options.collection, options.forces), self._policy
        )

    async def _prune(self, known: Mapping[str, str]) -> None:
        if self.progress.has_unreadable or not self._seen:
            why = "some files could not be read" if self.progress.has_unreadable else "there are no documents to keep"
            sys.stderr.write(f"sluice rag ingest: nothing was pruned, as {why}\n")
            return
        selection = self._options.selection
        for document_id in known:
            if document_id not in self._seen and selection.covers(document_id):
                await self._delete(document_id)

    async def _delete(self, document_id: str) -> None:
        if self._options.is_dry:
            self._show("delete", document_id)
        else:
            collection = self._options.collection
            await retry_request(lambda: self._client.delete_document(collection, document_id), self._policy)
        self.progress.num_deleted += 1

    def _show(self, action: str, document_id: str) -> None:
        sys.stdout.write(f"would {action} {strip_control(document_id)}\n")


async def retry_request(send: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """Return the result of `send`, repeated while the server cannot answer. Raises the last error.

    A broken connection is raised at once: the caller has to find out whether the request caused it.
    """
    for wait_s in policy.waits_s:
        try:
            return await send()
        except BrokenConnectionError:
            raise
        except UnreachableError:
            await asyncio.sleep(wait_s)
        except RejectedRequestError as error:
            if not error.is_transient:
                raise
            requested_s = wait_s if error.retry_after_s is None else error.retry_after_s
            await asyncio.sleep(min(requested_s, policy.longest_wait_s))
    return await send()


# --- progress


@dataclass(slots=True)
class IngestionProgress:
    """Counts documents by outcome. `num_planned` grows when a file turns out to hold many documents."""

    noun = "documents"

    num_planned: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    num_chunks: int = 0
    num_deleted: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(document or file, reason), in the order in which they failed."""
    has_unreadable: bool = False
    """Whether a file or folder could not be read, so that its documents are unknown."""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def num_done(self) -> int:
        return self.statuses.total() + len(self.failures)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def chunks_per_s(self) -> float:
        return self.num_chunks / max(self.elapsed_s, 1e-3)

    def count(self, status: str, num_chunks: int = 0) -> None:
        """Count a document. `num_chunks` are the chunks made in this run, none for an unchanged document."""
        self.statuses[status] += 1
        self.num_chunks += num_chunks

    def fail(self, name: str, reason: str) -> None:
        self.failures.append((name, reason))

    def pace(self) -> str:
        """Return the speed and what failed."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{self.chunks_per_s:,.0f} chunks/s{failed}"

    def summary(self) -> str:
        """Return all counts on one line."""
        counts = [f"{self.statuses[status]} {status}" for status in ("created", "updated", "unchanged")]
        if self.num_deleted:
            counts.append(f"{self.num_deleted} deleted")
        if self.failures:
            counts.append(f"{len(self.failures)} failed")
        speed = f"; {self.num_chunks} chunks in {self.elapsed_s:.1f} s" if self.num_chunks else ""
        return f"{', '.join(counts)}{speed}"
