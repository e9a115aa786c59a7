"""An instance of an array model: a thread that runs batches, but for short ones, which the event loop runs itself."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns, thread_time_ns

from sluice.errors import ErrorCode, SluiceError
from sluice.priority import lower_thread
from sluice.serving.backends.arrays.batch import BatchAssembler
from sluice.serving.backends.arrays.session import ArrayRun, ArraySession
from sluice.serving.instance import HostPolicy, Instance, Placement
from sluice.serving.job import InferJob
from sluice.serving.loop_turn import LoopTurn
from sluice.serving.request import InferResponse

SHORT_NS = 300_000
"""Longest run that the event loop does itself: about two hand-overs to a thread."""
HELD_NS = 5_000_000
"""Time by the clock from which a run on the loop counts as long whatever the reason. Below it, the usual reason is a
busy machine."""
_MIN_RUNS = 8
"""Runs on a thread before one is short enough for the loop."""
_DECAY = 0.9


@dataclass(slots=True)
class _Learned:
    """The run times of one batch size: the slowest recent one in CPU time, and the fastest by the clock.

    Threads wait for each other and for the interpreter's lock, so their runs look longer than they are.
    """

    num_runs: int = 0
    slowest_ns: float = 0.0
    quickest_ns: float = float("inf")

    def add(self, ns: int) -> None:
        self.slowest_ns = max(float(ns), _DECAY * self.slowest_ns + (1 - _DECAY) * ns)

    @property
    def is_short(self) -> bool:
        return self.num_runs >= _MIN_RUNS and self.slowest_ns < SHORT_NS and self.quickest_ns < 2 * SHORT_NS


class RunTimes:
    """Learns how long the runs of one instance take, by the number of elements in their inputs, in powers of two: on
    its thread first. Short runs are done by the event loop itself, because handing one to a thread and back costs more
    than a small network."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Learned] = {}

    def are_short(self, num_elements: int) -> bool:
        """Whether runs with so many elements are known to be short."""
        found = self._by_size.get(num_elements.bit_length())
        return found is not None and found.is_short

    def note_thread(self, num_elements: int, own_ns: int, clock_ns: int) -> None:
        """Note a run on a thread, which took so much of the thread's time, and so long by the clock."""
        found = self._by_size.setdefault(num_elements.bit_length(), _Learned())
        found.num_runs += 1
        found.quickest_ns = min(found.quickest_ns, clock_ns)
        found.add(own_ns)

    def note_loop(self, num_elements: int, own_ns: int, clock_ns: int) -> None:
        """Note a run on the event loop, which took so much of the loop's own time, and held it for so long."""
        self._by_size[num_elements.bit_length()].add(own_ns if clock_ns < HELD_NS else clock_ns)


def prepare_thread(placement: Placement, policy: HostPolicy | None) -> None:
    """Bind the calling thread by `policy`. One that computes gives way to the gateway. So will threads that a library
    starts on it. Raises OSError where the host forbids binding."""
    if placement.gpu is None:
        lower_thread()
    if policy is not None:
        policy.bind()


class _RunningBatch:
    """Jobs that run together. The run is stopped once all of them are cancelled."""

    def __init__(self, jobs: list[InferJob], run: ArrayRun, done: Callable[[], None]) -> None:
        self.jobs = jobs
        self.run = run
        self.done = done
        self.responses: list[InferResponse] = []
        self.num_elements = sum([each.num_elements for job in jobs for each in job.request.inputs.values()])
        for job in jobs:
            job.on_cancel = self._stop_if_unwanted

    def _stop_if_unwanted(self) -> None:
        if all(job.is_cancelled for job in self.jobs):
            self.run.stop()


class ArrayInstance(Instance):
    """Runs batches on a thread of its own. Instances on one device share a session: weights and intra-op threads."""

    def __init__(
        self,
        placement: Placement,
        session: ArraySession,
        assembler: BatchAssembler,
        policy: HostPolicy | None = None,
        turn: LoopTurn | None = None,
    ) -> None:
        """Must be called on the event loop. `policy` binds the instance's thread. `turn` is shared by all instances
        whose short runs the loop does; None: it does none."""
        self.name = placement.name
        self.placement = placement
        self._session = session
        self._session.hold()
        self._is_closed = False
        self._assembler = assembler
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix=self.name, initializer=partial(prepare_thread, placement, policy)
        )
        self._batch: _RunningBatch | None = None
        is_bound = placement.gpu is not None or policy is not None
        self._turn = None if is_bound or not assembler.keeps_nothing else turn
        self._times = RunTimes()

    @property
    def is_idle(self) -> bool:
        return self._batch is None

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self._batch = batch = _RunningBatch(jobs, self._session.open_run(), done)
        turn = self._turn
        if turn is None or not batch.run.can_stop or not turn.has_time or not self._times.are_short(batch.num_elements):
            self._thread.submit(self._run, batch)
        else:
            self._run_here(batch, turn)

    def _run_here(self, batch: _RunningBatch, turn: LoopTurn) -> None:
        """Run a batch on the event loop; one that takes long after all is stopped, and begins again on the thread."""
        turn.begin(batch.run)
        own_ns = thread_time_ns()
        batch.responses = self._run_jobs(batch, batch.jobs)
        self._times.note_loop(batch.num_elements, thread_time_ns() - own_ns, turn.end())
        if batch.run.is_stopped:
            batch.run = self._session.open_run()
            self._thread.submit(self._run, batch)
        else:
            self._finish(batch)

    def _run(self, batch: _RunningBatch) -> None:
        """Run a batch. Called on the instance's thread."""
        began_ns, own_ns = perf_counter_ns(), thread_time_ns()
        batch.responses = self._run_jobs(batch, batch.jobs)
        own_ns, clock_ns = thread_time_ns() - own_ns, perf_counter_ns() - began_ns
        self._loop.call_soon_threadsafe(self._finish_run, batch, own_ns, clock_ns)

    def _finish_run(self, batch: _RunningBatch, own_ns: int, clock_ns: int) -> None:
        self._times.note_thread(batch.num_elements, own_ns, clock_ns)
        self._finish(batch)

    def _run_jobs(self, batch: _RunningBatch, jobs: Sequence[InferJob]) -> list[InferResponse]:
        """Return a response for each job. A failed batch of several runs again job by job: one may be the cause."""
        try:
            return self._run_batch(batch, jobs)
        except Exception as error:
            if len(jobs) > 1 and self._assembler.can_rerun and not batch.run.is_stopped:
                return [response for job in jobs for response in self._run_jobs(batch, [job])]
            failure = error if isinstance(error, SluiceError) else self._session.convert_error(error)
            return [InferResponse(error=failure) for _ in jobs]

    def _run_batch(self, batch: _RunningBatch, jobs: Sequence[InferJob]) -> list[InferResponse]:
        requests = [job.request for job in jobs]
        outputs = self._assembler.requested_outputs(requests)
        inputs = self._assembler.join_inputs(requests)
        started = perf_counter_ns()
        arrays = batch.run.execute(inputs, outputs)
        ended = perf_counter_ns()
        for job in jobs:
            job.infer_started_ns, job.infer_ended_ns = started, ended
        return [InferResponse(tensors) for tensors in self._assembler.split_outputs(requests, outputs, arrays)]

    def _finish(self, batch: _RunningBatch) -> None:
        self._batch = None
        # First, so that the thread takes the next batch while the responses of this one are written.
        batch.done()
        for job, response in zip(batch.jobs, batch.responses, strict=True):
            job.respond(response)

    async def close(self) -> None:
        """Stop the current run at its next operator and fail its jobs. The thread ends by itself."""
        if self._batch is not None:
            self._batch.run.stop()
            for job in self._batch.jobs:
                job.fail(SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} is unloaded"))
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._session.release)
            self._thread.shutdown(wait=False)
