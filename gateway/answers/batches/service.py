"""Files and batches as the protocol's routes use them, and the worker behind them."""

import time
from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.errors import invalid
from sluice.gateway.answers.batches.line_run import AnswerLine
from sluice.gateway.answers.batches.lines import ENDPOINTS
from sluice.gateway.answers.batches.places import PlaceKeeper, measure_capacity
from sluice.gateway.answers.batches.records import Batch, BatchStatus, FileRecord, new_id
from sluice.gateway.answers.batches.store import FileUpload, StateStore
from sluice.gateway.answers.batches.worker import BatchWorker
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.tenancy.access.identity import Identity

_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


class BatchService:
    """Files and batches of one server. Nothing touches the disk before the first file is uploaded."""

    def __init__(self, plane: Plane, rooms: Rooms, config: ServeConfig) -> None:
        options = config.batches
        self.store = StateStore(config.state_folder(), options.max_stored_bytes, options.max_file_bytes)
        self._max_requests = options.max_requests
        self._plane = plane
        self._rooms = rooms
        rooms.join(notice=self.store.problem)
        self._places = PlaceKeeper(partial(measure_capacity, plane))
        self._worker: BatchWorker | None = None

    def start(self, answer: AnswerLine) -> None:
        """Begin to work on batches, those of an earlier process first. `answer` has the server's handlers answer."""
        check = partial(check_model, self._plane)
        self._worker = BatchWorker(self.store, self._places, answer, check, self._max_requests)
        self._rooms.join(BatchCollector(self._worker, self._places))
        self._worker.start()

    async def stop(self) -> None:
        """Stop to work on batches; the next process goes on from here. Idempotent."""
        if self._worker is not None:
            await self._worker.stop()

    async def close(self) -> None:
        await self.stop()
        await self.store.close()

    async def add_file(
        self, upload: FileUpload, owner: str, purpose: str, filename: str, lasts_s: int | None
    ) -> FileRecord:
        """Keep an upload. Raises TOO_LARGE where the stored files are too large together."""
        now = int(time.time())
        record = FileRecord(
            id=upload.id,
            owner=owner,
            purpose=purpose,
            filename=filename,
            num_bytes=upload.num_bytes,
            created_at=now,
            expires_at=None if lasts_s is None else now + lasts_s,
        )
        await upload.keep()
        await self.store.add_file(record)
        return record

    async def create(
        self,
        owner: str,
        tenant: str,
        sender: Identity | None,
        input_file_id: str,
        endpoint: str,
        window: str,
        window_s: int,
        metadata: Mapping[str, str] | None,
        output_lasts_s: int | None,
        num_requests: int = 0,
    ) -> Batch:
        """Create a batch, which is validated soon. `num_requests` is 0 where only validation tells. Raises INVALID,
        OVERLOADED."""
        if endpoint not in ENDPOINTS:
            raise invalid("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}, got {endpoint[:80]!r}")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            owner=owner,
            tenant=tenant,
            sender=sender,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + window_s,
            metadata=None if metadata is None else dict(metadata),
            output_expires_after_s=output_lasts_s,
            num_requests=num_requests,
        )
        await self.store.add_batch(batch)
        self._wake()
        return batch

    def check_model(self, endpoint: str, model: str) -> None:
        """Raise SluiceError where `endpoint` does not answer for `model`."""
        check_model(self._plane, endpoint, model)

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch: requests that are under way end, and finished ones keep their results. Raises NOT_FOUND, and
        INVALID for one that is over."""

        def change(batch: Batch) -> Batch:
            if batch.status not in _CANCELLABLE:
                raise invalid("batch_id", f"Cannot cancel a batch with status '{batch.status}'.")
            is_new = batch.status is not BatchStatus.CANCELLING
            return batch.moved(BatchStatus.CANCELLING, int(time.time())) if is_new else batch

        changed = await self.store.change(batch_id, change, owner)
        self._wake()
        return changed

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()


def check_model(plane: Plane, endpoint: str, model: str) -> None:
    """Raise SluiceError where `endpoint` does not answer for `model`."""
    if endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        plane.llm(model)
    elif endpoint == "/v1/embeddings":
        plane.embedder(model)
    else:
        plane.models.find(model)


class BatchCollector(Collector):
    """Collects what this process does for batches."""

    def __init__(self, worker: BatchWorker, places: PlaceKeeper) -> None:
        self._worker = worker
        self._places = places

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("sluice_batches", "Batches that this process works on.", value=self._worker.num_batches)
        yield GaugeMetricFamily(
            "sluice_batch_requests_running", "Requests of batches that run.", value=self._places.num_taken
        )
        finished = CounterMetricFamily(
            "sluice_batch_requests",
            "Requests of batches whose results were written, by how they ended.",
            labels=("outcome",),
        )
        for outcome, count in self._worker.num_finished.items():
            finished.add_metric((outcome,), count)
        yield finished
        yield CounterMetricFamily(
            "sluice_batch_yields",
            "Requests of batches that stopped, to start over later, as other requests waited.",
            value=self._places.num_revoked,
        )
