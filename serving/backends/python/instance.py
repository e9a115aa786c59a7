"""The places of Python workers, as the scheduler sees them."""

from collections.abc import Callable, Sequence

from serving.backends.python.supervisor import MAX_LOOKAHEAD, SupervisedWorker
from serving.instance import Instance, Placement
from serving.job import InferJob


class PythonInstance(Instance):
    """A place for one batch with a worker: it runs that batch, or has it wait in its process for the one before.

    A worker of fast models has several places in use, so that it finds the next batch when it has finished one:
    handing over takes longer than running then.
    """

    def __init__(self, worker: SupervisedWorker, placement: Placement, workers: Sequence[SupervisedWorker]) -> None:
        """`workers` are all of the model, among which the requests are spread."""
        self.name = worker.name
        self.placement = placement
        self._worker = worker
        self._others = [each for each in workers if each is not worker]
        self._is_busy = False

    @property
    def num_starts(self) -> int:  # type: ignore[override]  # the worker counts, for all of its places
        return self._worker.num_starts

    @property
    def is_ready(self) -> bool:
        worker = self._worker
        if not worker.is_ready:
            return False
        return self._is_busy or (worker.num_batches < worker.depth and self._is_least_loaded())

    def _is_least_loaded(self) -> bool:
        load = self._worker.num_batches
        return load == 0 or all(load <= each.num_batches for each in self._others if each.is_ready)

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self._is_busy = True

        def finish() -> None:
            self._is_busy = False
            done()

        self._worker.execute(jobs, finish)

    async def close(self) -> None:
        await self._worker.close()


def instances_of(
    workers: Sequence[SupervisedWorker], placements: Sequence[Placement], may_queue: bool
) -> list[PythonInstance]:
    """The places of `workers`, their first ones first. Without `may_queue` each has only that."""
    num_places = 1 + MAX_LOOKAHEAD if may_queue else 1
    placed = list(zip(workers, placements, strict=True))
    return [PythonInstance(worker, placement, workers) for _ in range(num_places) for worker, placement in placed]
