"""Two servers that share a folder."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.gateway.answers.batches import worker
from sluice.gateway.answers.batches.line_run import Answered
from sluice.gateway.answers.batches.places import Capacity, PlaceKeeper
from sluice.gateway.answers.batches.records import BATCH_PURPOSE, Batch, BatchStatus, FileRecord
from sluice.gateway.answers.batches.store import StateStore
from sluice.gateway.answers.batches.worker import BatchWorker
from sluice.gateway.tenancy.access.identity import Identity
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
        record = FileRecord(
            id=upload.id, owner="o", purpose=BATCH_PURPOSE, filename="f", num_bytes=upload.num_bytes, created_at=1
        )
    await store.add_file(record)
    batch = Batch(
        id="batch_1",
        owner="o",
        tenant="",
        endpoint=url,
        input_file_id=record.id,
        completion_window="24h",
        created_at=1,
        expires_at=1 << 40,
    )
    await store.add_batch(batch)
    return batch


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
