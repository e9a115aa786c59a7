"""Two servers that share a folder."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import msgspec
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.batches import store as batch_store
from sluice.gateway.answers.batches import worker
from sluice.gateway.answers.batches.line_run import Answered
from sluice.gateway.answers.batches.places import Capacity, PlaceKeeper
from sluice.gateway.answers.batches.records import BATCH_PURPOSE, Batch, BatchStatus, FileRecord
from sluice.gateway.answers.batches.store import SCHEMA, Page, StateStore
from sluice.gateway.answers.batches.worker import BatchWorker
from sluice.gateway.tenancy.access.identity import Identity
from sluice.state.connections import Schema
from tests.waiting import until

NUM_REQUESTS = 5


class Server:
    """A worker on the folder, whose application answers the requests in `answers` and keeps the others waiting."""

    def __init__(self, folder: Path, *answers: int) -> None:
        self.store = StateStore(folder, 1 << 20, 1 << 20)
        self.asked: list[int] = []
        self.released = asyncio.Event()
        """Set where the others are answered, too."""
        self._answers = answers
        places = PlaceKeeper(lambda model, num_taken: Capacity(8, 8))
        self.worker = BatchWorker(self.store, places, self._answer, lambda url, model: None, 100)

    async def _answer(
        self, url: str, body: bytes, *, request_id: str, tenant: str, sender: Identity | None
    ) -> Answered:
        number = json.loads(body)["n"]
        self.asked.append(number)
        if number not in self._answers:
            await self.released.wait()
        return Answered(200, body)

    async def close(self) -> None:
        await self.worker.stop()
        await self.store.close()


async def begin(store: StateStore) -> Batch:
    url = "/v1/completions"
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": {"model": "m", "n": n}}
        for n in range(NUM_REQUESTS)
    ]
    async with store.new_upload() as upload:
        await upload.write("\n".join(map(json.dumps, lines)).encode())
        await upload.keep()
    await store.add_file(file_record(upload.id, upload.num_bytes))
    await store.add_batch(batch := unfinished("batch_1", upload.id))
    return batch


def file_record(file_id: str, num_bytes: int) -> FileRecord:
    return FileRecord(id=file_id, owner="o", purpose=BATCH_PURPOSE, filename="f", num_bytes=num_bytes, created_at=1)


def unfinished(batch_id: str, input_file_id: str) -> Batch:
    rest: Any = {"endpoint": "/v1/completions", "completion_window": "24h", "created_at": 1, "expires_at": 1 << 40}
    return Batch(id=batch_id, owner="o", tenant="", input_file_id=input_file_id, **rest)


async def wait(store: StateStore, is_reached: Callable[[Batch], bool]) -> Batch:
    async def reached() -> Batch | None:
        batch = await store.batch("o", "batch_1")
        return batch if is_reached(batch) else None

    found: Batch = await until(reached)
    return found


async def test_the_second_server_goes_on_where_the_first_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "REPORT_S", 0.01)
    first, second = Server(tmp_path, 0, 1), Server(tmp_path, *range(NUM_REQUESTS))
    await begin(first.store)
    first.worker.start()
    await wait(first.store, lambda batch: batch.counts.completed == 2)
    second.worker.start()
    second.worker.wake()
    await wait(second.store, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
    assert second.asked == []
    await first.close()
    done = await wait(second.store, lambda batch: batch.status is BatchStatus.COMPLETED)
    assert done.counts.completed == NUM_REQUESTS and sorted(second.asked) == [2, 3, 4]
    await second.close()


async def test_a_clock_that_jumps_past_its_end_does_not_end_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "REPORT_S", 0.01)
    server = Server(tmp_path, 0, 1)
    await begin(server.store)
    server.worker.start()
    batch = await wait(server.store, lambda batch: batch.counts.completed == 2)
    monkeypatch.setattr(worker, "time", SimpleNamespace(time=lambda: batch.expires_at + 1.0))
    change, reports = server.store.change, list[Batch]()

    async def report(*arguments: Any, **named: Any) -> Batch:
        reports.append(await change(*arguments, **named))
        return reports[-1]

    monkeypatch.setattr(server.store, "change", report)
    await until(lambda: len(reports) >= 3)
    server.released.set()
    done = await wait(server.store, lambda batch: batch.status not in (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING))
    assert (done.status, done.counts.completed) == (BatchStatus.COMPLETED, NUM_REQUESTS)
    await server.close()


@pytest.mark.parametrize("seed", range(3))
async def test_changes_of_several_servers_keep_what_all_must_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Files within their bound, few unfinished batches, each of which has its input; and nothing is lost."""
    monkeypatch.setattr(batch_store, "MAX_UNFINISHED", 3)
    stores = [StateStore(tmp_path, 50, 1 << 20) for _ in range(3)]
    await stores[0].add_file(file_record("file-0", 5))

    async def work(name: str, store: StateStore, chance: random.Random) -> list[str]:
        own: list[str] = []
        for number in range(12):
            try:
                match chance.choice(["add", "add", "batch", "delete", "end"]):
                    case "add":
                        await store.add_file(file_record(file_id := f"file-{name}-{number}", 5))
                        own.append(file_id)
                    case "batch":
                        await store.add_batch(unfinished(f"batch_{name}-{number}", chance.choice(own or ["file-0"])))
                    case "delete" if own:
                        await store.delete_file("o", own[-1])
                        own.pop()
                    case "end":
                        for batch in (await store.unfinished())[:1]:
                            await store.change(batch.id, lambda now: now.moved(BatchStatus.COMPLETED, 1))
            except SluiceError as refused:
                assert refused.code is not ErrorCode.UNAVAILABLE
        return own

    owned = await asyncio.gather(*(work(str(n), each, random.Random(10 * seed + n)) for n, each in enumerate(stores)))
    files, batches = await stores[0].files("o", "", Page(100)), await stores[0].batches("o", Page(100))
    assert {each.id for each in files} == {"file-0", *(file_id for own in owned for file_id in own)}
    assert len({each.number for each in files} | {each.number for each in batches}) == len(files) + len(batches)
    inputs = {each.input_file_id for each in await stores[0].unfinished()}
    assert len(inputs) <= 3 and inputs <= {each.id for each in files}
    await stores[1].add_file(file_record("file-last", 50 - 5 * len(files)))
    with pytest.raises(SluiceError, match="the stored files have 50"):
        await stores[2].add_file(file_record("file-more", 1))
    for each in stores:
        await each.close()


async def test_a_file_from_before_shelves_keeps_its_files_and_batches(tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "state.sqlite"))
    Schema(SCHEMA.application_id, SCHEMA.steps[:1]).upgrade(connection)
    ended = unfinished("batch_1", "file-a").moved(BatchStatus.FAILED, 2)
    both = {"files": ("num_bytes", "purpose"), "batches": ("status", "input_file_id")}
    records = file_record("file-a", 30), file_record("file-b", 12), ended, unfinished("batch_2", "file-b")
    for record in records:
        table, columns = next(each for each in both.items() if hasattr(record, each[1][0]))
        fields = msgspec.to_builtins(record)
        del fields["number"]
        values = record.id, record.owner, *(getattr(record, each) for each in columns), msgspec.json.encode(fields)
        connection.execute(
            f"INSERT INTO {table} (id, owner, {', '.join(columns)}, record) VALUES (?, ?, ?, ?, ?)", values
        )
    connection.close()
    store = StateStore(tmp_path, 50, 1 << 20)
    assert [each.id for each in await store.files("o", "", Page(10))] == ["file-b", "file-a"]
    assert [each.id for each in await store.batches("o", Page(10))] == ["batch_2", "batch_1"]
    assert await store.batches("o", Page(10), "/v1/messages") == await store.batches("p", Page(10)) == []
    assert (await store.batch("o", "batch_1")).times == ended.times
    assert [each.id for each in await store.unfinished()] == ["batch_2"]
    await store.add_file(file_record("file-c", 8))
    await store.add_file(msgspec.structs.replace(file_record("file-old", 0), expires_at=1))  # is not listed
    assert (await store.files("o", "", Page(10)))[0].id == "file-c"
    with pytest.raises(SluiceError, match="the stored files have 50"):
        await store.add_file(file_record("file-d", 1))
    await store.close()
