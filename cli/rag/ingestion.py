"""Brings a collection to what was found: sends what the server lacks, deletes what is gone."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cli.rag.candidates import Candidate, candidates
from cli.rag.client import JsonObject, RagClient
from cli.rag.failures import Broken, Refused
from cli.rag.files import FoundFile, Selection, Unread
from cli.rag.retries import RetryPolicy, patiently
from cli.rag.tally import Tally
from cli.rag.terminal import harmless

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Options:
    """`num_jobs` uploads at once. `is_dry`: show what would be done, and do nothing."""

    collection: str
    selection: Selection
    num_jobs: int = 4
    prunes: bool = False
    forces: bool = False
    is_dry: bool = False


class Ingestion:
    """One run. Its tally is true at any time, also where the run ends early."""

    def __init__(self, client: RagClient, options: Options, patience: RetryPolicy) -> None:
        self.tally = Tally()
        self._client = client
        self._options = options
        self._patience = patience
        self._seen: set[str] = set()

    async def run(self, found: Sequence[FoundFile | Unread]) -> None:
        """Raises RagError where the server cannot go on; what was done stays."""
        self.tally.num_planned = len(found)
        known = await self._known()
        waiting = self._candidates(found)

        async def work() -> None:
            for candidate in waiting:
                await self._bring(candidate, known)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.num_jobs):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if self._options.prunes:
            await self._prune(known)

    async def _known(self) -> dict[str, str]:
        """The content hashes of the documents that the server has, by id."""
        try:
            return {each["id"]: each["content_hash"] async for each in self._client.documents(self._options.collection)}
        except Refused as refused:
            if refused.status != _NOT_FOUND:
                raise
            return {}  # the first document makes the collection

    def _candidates(self, found: Sequence[FoundFile | Unread]) -> Iterator[Candidate]:
        for each in found:
            parts = [each] if isinstance(each, Unread) else candidates(each)
            for number, part in enumerate(parts):
                self.tally.num_planned += number > 0
                if isinstance(part, Unread):
                    self.tally.has_unread = True
                    self.tally.fail(part.name, part.reason)
                elif part.id in self._seen:
                    # Sent side by side, whichever came last would stay, and the other be sent the next time.
                    self.tally.fail(part.id, "a document of this id came before it, and is kept")
                else:
                    self._seen.add(part.id)
                    yield part

    async def _bring(self, candidate: Candidate, known: Mapping[str, str]) -> None:
        try:
            if not self._options.forces and known.get(candidate.id) == await candidate.content_hash():
                self.tally.count("unchanged")
            elif self._options.is_dry:
                self._show("update" if candidate.id in known else "create", candidate.id)
                self.tally.count("updated" if candidate.id in known else "created")
            else:
                await self._send(candidate)
        except OSError as error:
            self.tally.fail(candidate.id, error.strerror or str(error))
        except Refused as refused:
            if not refused.is_of_the_document:
                raise
            self.tally.fail(candidate.id, str(refused))

    async def _send(self, candidate: Candidate) -> None:
        try:
            told = await self._sent(candidate)
        except Broken:
            await patiently(self._client.collections, self._patience)  # raises where the server does not come back
            try:
                told = await self._sent(candidate)
            except Broken as broken:
                self.tally.fail(candidate.id, f"{broken}; is it more than the server's --http-max-input-size?")
                return
        self.tally.count(told["status"], 0 if told["status"] == "unchanged" else told["num_chunks"])

    async def _sent(self, candidate: Candidate) -> JsonObject:
        options = self._options
        return await patiently(lambda: candidate.send(self._client, options.collection, options.forces), self._patience)

    async def _prune(self, known: Mapping[str, str]) -> None:
        if self.tally.has_unread or not self._seen:
            why = "some files could not be read" if self.tally.has_unread else "there are no documents to keep"
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
            await patiently(lambda: self._client.delete_document(collection, document_id), self._patience)
        self.tally.num_deleted += 1

    def _show(self, what: str, document_id: str) -> None:
        sys.stdout.write(f"would {what} {harmless(document_id)}\n")
