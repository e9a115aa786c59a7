"""Works on the batches: validates them, runs their requests, and publishes the results. It can stop at any point, and
another process goes on from what is on the disk."""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic

import msgspec

from sluice.errors import SluiceError
from sluice.gateway.answers.batches.line_run import AnswerLine, FinishForecast, LineRun
from sluice.gateway.answers.batches.lines import check_file, pending_lines
from sluice.gateway.answers.batches.places import PlaceKeeper
from sluice.gateway.answers.batches.records import OUTPUT_PURPOSE, Batch, BatchStatus, FileRecord, LineProblem
from sluice.gateway.answers.batches.results import BatchResult, ResultFiles
from sluice.gateway.answers.batches.store import StateStore

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Time between looks at the store for what another server put there, and before work that failed is tried again."""
SWEEP_S = 60.0
"""Time between looks for files that have expired."""
REPORT_S = 1.0
"""Time between updates of a batch's counts and forecast in the store."""

CheckModel = Callable[[str, str], None]
"""Raises SluiceError where the endpoint does not answer for the model."""


class BatchWorker:
    """Works on all unfinished batches of a store at once. Of several servers with one store, one does so at a time."""

    def __init__(
        self, store: StateStore, places: PlaceKeeper, answer: AnswerLine, check_model: CheckModel, max_requests: int
    ) -> None:
        self._store = store
        self._places = places
        self._answer = answer
        self._check_model = check_model
        self._max_requests = max_requests
        self._lock = -1
        self._next_sweep = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelling: dict[str, asyncio.Event] = {}
        self._is_due = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self.num_finished = {"completed": 0, "failed": 0}
        """Requests that this process has finished, by how."""

    @property
    def num_batches(self) -> int:
        """Batches that this process works on."""
        return len(self._tasks)

    def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise(), name="batches")

    def wake(self) -> None:
        """Look at the store soon."""
        self._is_due.set()

    async def stop(self) -> None:
        """Stop all work. Requests that are under way are asked again by the next process. Idempotent."""
        tasks = [task for task in (self._supervisor, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _supervise(self) -> None:
        while True:
            self._is_due.clear()
            try:
                if await asyncio.to_thread(self._hold_lock):
                    await self._look()
            except (SluiceError, OSError) as error:
                log.error("batches: %s", error)
            except Exception:
                log.exception("looking for batches failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._is_due.wait()

    def _hold_lock(self) -> bool:
        """Return whether this process works on the batches of the store. The system frees the lock when it ends."""
        if self._lock >= 0:
            return True
        if not self._store.exists:
            return False
        lock = os.open(self._store.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    async def _look(self) -> None:
        """Start work on batches that nobody works on, and end it on those that are to be cancelled."""
        if monotonic() >= self._next_sweep:
            self._next_sweep = monotonic() + SWEEP_S
            await self._store.sweep()
        for batch in await self._store.unfinished():
            if batch.id not in self._tasks:
                self._cancelling[batch.id] = asyncio.Event()
                task = asyncio.create_task(self._work(batch), name=batch.id)
                self._tasks[batch.id] = task
                task.add_done_callback(partial(self._forget, batch.id))
            if batch.status is BatchStatus.CANCELLING:
                self._cancelling[batch.id].set()

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[batch_id], self._cancelling[batch_id]

    async def _work(self, batch: Batch) -> None:
        """Bring a batch to its end. After a failure that is none of the batch's own, it is taken up again."""
        try:
            if batch.status is BatchStatus.VALIDATING:
                batch = await self._validate(batch)
            if batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING):
                await self._run(batch)
        except FileNotFoundError as error:
            log.error("batch %s failed: %s", batch.id, error)
            await self._fail(batch, LineProblem("file_not_found", "a file of the batch is gone from the server"))
        except (SluiceError, OSError) as error:
            log.error("batch %s stopped, and is tried again: %s", batch.id, error)
        except Exception as error:
            log.exception("batch %s failed", batch.id)
            message = f"the batch failed unexpectedly ({type(error).__name__})"
            await self._fail(batch, LineProblem("internal_error", message))

    async def _fail(self, batch: Batch, problem: LineProblem) -> None:
        await self._store.change(batch.id, lambda now: now.moved(BatchStatus.FAILED, _now(), problems=[problem]))

    # -- validating

    async def _validate(self, batch: Batch) -> Batch:
        path = self._store.path(batch.input_file_id)
        found = await asyncio.to_thread(check_file, path, self._max_requests, batch.endpoint)
        for (url, model), line in found.targets.items():
            try:
                self._check_model(url, model)
            except SluiceError as error:
                found.problems.append(LineProblem("model_not_found", error.message, line, "body.model"))
        if found.problems:
            return await self._move(batch, BatchStatus.FAILED, problems=found.problems)
        _, model = next(iter(found.targets))
        return await self._move(batch, BatchStatus.IN_PROGRESS, num_requests=found.num_requests, model=model)

    async def _move(self, batch: Batch, status: BatchStatus, **changes: object) -> Batch:
        """Move the batch to a state, unless its client has cancelled it meanwhile."""

        def change(now: Batch) -> Batch:
            return now if now.status is BatchStatus.CANCELLING else now.moved(status, _now(), **changes)

        return await self._store.change(batch.id, change)

    # -- running

    async def _run(self, batch: Batch) -> None:
        """Run what is pending, and publish the results."""
        results = ResultFiles(self._store.path(batch.output_id), self._store.path(batch.errors_id))
        try:
            await results.open()
            if batch.status is BatchStatus.IN_PROGRESS:
                await self._ask_pending(batch, results)
                is_expired = results.counts.total < batch.num_requests
                batch = await self._move(batch, BatchStatus.FINALIZING, is_expired=is_expired)
            if batch.status is BatchStatus.FINALIZING:
                await self._mark_expired(batch, results)
        finally:
            await results.close()
        await self._publish(batch, results)

    async def _ask_pending(self, batch: Batch, results: ResultFiles) -> None:
        """Ask until all is finished, the time is over, or the batch is to be cancelled."""
        line_run = LineRun(batch.id, batch.tenant, batch.sender, self._answer, self._places, results, self._count)
        lines = pending_lines(self._store.path(batch.input_file_id), results.finished)
        forecast = FinishForecast()
        running = asyncio.create_task(line_run.run(lines))
        cancelling = asyncio.create_task(self._cancelling[batch.id].wait())
        ends_at = monotonic() + batch.expires_at - time.time()  # a clock that jumps meanwhile ends nothing
        try:
            while (left_s := ends_at - monotonic()) > 0:
                await self._report(batch, results, forecast)
                timeout_s = min(REPORT_S, left_s)
                await asyncio.wait((running, cancelling), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                    break
                if cancelling.done():
                    break
        finally:
            running.cancel()
            cancelling.cancel()
            await asyncio.wait((running, cancelling))

    def _count(self, result: BatchResult) -> None:
        self.num_finished["completed" if result.is_ok else "failed"] += 1

    async def _report(self, batch: Batch, results: ResultFiles, forecast: FinishForecast) -> None:
        """Write counts and forecast to the store."""
        counts = results.counts
        forecast.observe(counts.total)
        left_s = forecast.remaining_s(batch.num_requests)
        at = None if left_s is None else int(time.time() + left_s)
        reported = {"counts": counts, "usage": results.output.usage, "forecast_at": at}
        await self._store.change(batch.id, lambda now: msgspec.structs.replace(now, **reported))

    async def _mark_expired(self, batch: Batch, results: ResultFiles) -> None:
        """Write an error for each request that is not finished."""
        lines = pending_lines(self._store.path(batch.input_file_id), results.finished)
        while results.counts.total < batch.num_requests:
            expired = await asyncio.to_thread(lambda: [BatchResult.expired(x.custom_id) for x in islice(lines, 1000)])
            await results.add(*expired)

    async def _publish(self, batch: Batch, results: ResultFiles) -> None:
        """Show the files of the results, and move the batch to its last state, in one transaction."""
        now, lasts_s = _now(), batch.output_expires_after_s
        outputs = [
            FileRecord(
                id=file_id,
                owner=batch.owner,
                purpose=OUTPUT_PURPOSE,
                filename=f"{batch.id}_{name}.jsonl",
                num_bytes=file.num_bytes,
                created_at=now,
                expires_at=None if lasts_s is None else now + lasts_s,
            )
            for name, file_id, file in (
                ("output", batch.output_id, results.output),
                ("error", batch.errors_id, results.errors),
            )
            if file.num_bytes
        ]
        ended = BatchStatus.EXPIRED if batch.is_expired else BatchStatus.COMPLETED
        status = BatchStatus.CANCELLED if batch.status is BatchStatus.CANCELLING else ended
        sums = {"counts": results.counts, "usage": results.output.usage}
        shown = {"has_output": bool(results.output.num_bytes), "has_errors": bool(results.errors.num_bytes)}
        await self._store.change(batch.id, lambda batch: batch.moved(status, now, **sums, **shown), outputs=outputs)


def _now() -> int:
    return int(time.time())
