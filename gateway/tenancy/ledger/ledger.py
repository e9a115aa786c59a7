"""The ledger as the observer of calls: keeps the rows of ended calls in memory for a moment, and has them written."""

import asyncio
import logging
from collections.abc import Iterable
from contextvars import Context
from datetime import timedelta
from time import monotonic
from uuid import uuid4

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.errors import SluiceError
from sluice.gateway.calls import Call, CallObserver
from sluice.gateway.tenancy.ledger.prices import PriceTable
from sluice.gateway.tenancy.ledger.rows import day_at, make_row, reached_model, sum_days
from sluice.gateway.tenancy.ledger.store import LedgerBatch, LedgerStore
from sluice.state.calendar_clock import CalendarClock
from sluice.state.outage import Outage

log = logging.getLogger(__name__)

FLUSH_S = 0.5
"""How long a row waits at most for others, before all are written together."""
BATCH_ROWS = 1000
"""So many rows are written at once."""
_MAX_BATCH_ROWS = 10_000
MAX_WAITING = 100_000
"""Rows that wait while the place cannot be used, at some 600 bytes; those that come then are lost."""
_MAX_DELAY_S = 5.0
_LAST_WRITE_S = 5.0
_PRUNE_INTERVAL_S = 3600.0
_PRUNED_ROWS = 5000


class CallLedger(Collector, CallObserver):
    """Writes a row for each call that reached a model. Belongs to the event loop, which never waits for it."""

    def __init__(
        self, store: LedgerStore, prices: PriceTable, *, retention_days: int = 0, only_known: bool = False
    ) -> None:
        """Rows stay for `retention_days`, 0 for ever. With `only_known`, calls of unknown senders have no row."""
        self.store = store
        self._prices = prices
        self._retention_days = retention_days
        self._only_known = only_known
        self._waiting: list[Call] = []
        self._is_full = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._writer = uuid4().hex
        self._num_batches = 0
        self._prunes_at = 0.0
        self._calendar = CalendarClock()
        away = f"up to {MAX_WAITING} rows wait in memory until the ledger can be used"
        self._outage = Outage(away, "the ledger can be used again")
        self.problem = ""
        """Why rows cannot be written now; "" where they can."""
        self._num_in_batch = 0
        self._num_written = 0
        self._num_dropped = 0

    def end(self, call: Call) -> None:
        """Have the row of a call written within a second."""
        if not reached_model(call) or (self._only_known and call.identity is None):
            return
        waiting = self._waiting
        if len(waiting) >= MAX_WAITING:
            self._num_dropped += 1
            return
        waiting.append(call)
        if self._task is None:
            # The task outlives the request, and must not take its context for its own.
            self._task = asyncio.get_running_loop().create_task(self._write_waiting(), name="ledger", context=Context())
        elif len(waiting) == BATCH_ROWS:
            self._is_full.set()

    async def _write_waiting(self) -> None:
        """Write until nothing waits: without requests there is no task."""
        try:
            while self._waiting:
                if not self._is_closing:
                    await self._wait_for_more()
                calls, self._waiting = self._waiting[:_MAX_BATCH_ROWS], self._waiting[_MAX_BATCH_ROWS:]
                await self._write(calls)
                await self._prune()
        finally:
            self._task = None

    async def _wait_for_more(self) -> None:
        self._is_full.clear()
        if len(self._waiting) < BATCH_ROWS:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._is_full.wait()
            except TimeoutError:
                pass

    async def _write(self, calls: list[Call]) -> None:
        """Write a batch, however long that takes."""
        self._num_in_batch = num_lost = len(calls)
        delay_s = FLUSH_S
        try:
            batch = await asyncio.to_thread(self._make_batch, calls)
            while num_lost:
                try:
                    await self.store.write(batch)
                    num_lost = 0
                except SluiceError as error:
                    self.problem = error.message
                    self._outage.failed(error)
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, _MAX_DELAY_S)
        except Exception:
            log.exception("%d rows of the ledger are lost", num_lost)
        finally:
            self._num_in_batch = 0
            self._num_dropped += num_lost
            self._num_written += len(calls) - num_lost
        if not num_lost:
            self.problem = ""
            self._outage.end()

    def _make_batch(self, calls: list[Call]) -> LedgerBatch:
        self._num_batches += 1
        rows = [make_row(call, self._prices) for call in calls]
        return LedgerBatch(self._writer, self._num_batches, rows, sum_days(rows))

    async def _prune(self) -> None:
        if not self._retention_days or monotonic() < self._prunes_at:
            return
        self._prunes_at = monotonic() + _PRUNE_INTERVAL_S
        before = day_at(self._calendar()) - timedelta(days=self._retention_days)
        try:
            while await self.store.delete_before(before, _PRUNED_ROWS) == _PRUNED_ROWS and not self._waiting:
                pass
        except SluiceError as error:
            log.warning("old rows were not deleted: %s", error.message)

    async def flush(self) -> None:
        """Wait until the rows of calls that have ended are written, or lost."""
        self._is_closing = True
        self._is_full.set()
        try:
            if self._task is not None:
                await asyncio.wait((self._task,), timeout=_LAST_WRITE_S)
        finally:
            self._is_closing = False

    async def close(self) -> None:
        """Write what waits, for some seconds at most, and close the store."""
        await self.flush()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            log.error("%d rows of the ledger are lost: it could not be used", self._num_dropped + len(self._waiting))
        await self.store.close()

    def collect(self) -> Iterable[Metric]:
        """Yield the families of the ledger."""
        yield CounterMetricFamily("sluice_ledger_rows", "Rows of the ledger that were written.", self._num_written)
        text = "Rows of the ledger that were lost: too many waited."
        yield CounterMetricFamily("sluice_ledger_dropped_rows", text, self._num_dropped)
        text, num_waiting = "Rows of the ledger that are not written yet.", len(self._waiting) + self._num_in_batch
        yield GaugeMetricFamily("sluice_ledger_waiting_rows", text, num_waiting)
        yield GaugeMetricFamily("sluice_ledger_failing", "1 while the ledger cannot be written.", bool(self.problem))
