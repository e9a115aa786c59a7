"""Requests that belong together: run one after the other, in order, on the instance that holds their state."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.batching.batcher import Batcher
from pipelines.batching.controls import ControlInputs
from pipelines.batching.wakeup import Wakeup
from pipelines.inference.job import Job
from pipelines.inference.types import SequenceFlag
from pipelines.tensors.tensor import Tensor

_NS_PER_US = 1000
_DEFAULT_IDLE_US = 1_000_000
"""Triton's `max_sequence_idle_microseconds` where a configuration has none."""


class _Lane:
    """An instance's batcher, and how many more sequences it takes."""

    __slots__ = ("batcher", "num_free")

    def __init__(self, batcher: Batcher, num_free: int) -> None:
        self.batcher = batcher
        self.num_free = num_free


class _Sequence:
    """One sequence under way: `current` is queued or running, `line` are its requests behind that one."""

    __slots__ = ("correlation_id", "current", "id_tensor", "is_broken", "lane", "line", "touched_ns")

    def __init__(self, correlation_id: int | str, id_tensor: Tensor | None) -> None:
        self.correlation_id = correlation_id
        self.id_tensor = id_tensor
        self.lane: _Lane | None = None
        self.line: deque[Job] = deque()
        self.current: Job | None = None
        self.touched_ns = 0
        self.is_broken = False
        """Whether one of its requests was cancelled before it ran: the model's state is not what it should be."""

    @property
    def is_busy(self) -> bool:
        return self.current is not None or bool(self.line)


class SequenceBatcher:
    """Gives sequences a place on an instance until they end, are idle for too long, or lose a request.

    A sequence that finds no place waits, and takes the first that becomes free.
    """

    def __init__(self, config: ModelConfig, batchers: Sequence[Batcher]) -> None:
        """`batchers` have one instance each."""
        given = config.sequence_batching
        num_places = given.oldest.max_candidate_sequences if given.HasField("oldest") else config.max_batch_size
        self._model = config.name
        self._idle_ns = (given.max_sequence_idle_microseconds or _DEFAULT_IDLE_US) * _NS_PER_US
        self._controls = ControlInputs(config)
        self._lanes = [_Lane(batcher, max(1, num_places)) for batcher in batchers]
        self._known: OrderedDict[int | str, _Sequence] = OrderedDict()
        """Those that take more requests, the one that was touched last at the end."""
        self._waiting: deque[_Sequence] = deque()
        """Those that have no place yet."""
        self._by_job: dict[Job, _Sequence] = {}
        self._wakeup = Wakeup(self._end_idle)

    @property
    def num_held(self) -> int:
        """Requests that wait for their sequence's turn."""
        return sum(1 for job, sequence in self._by_job.items() if sequence.current is not job)

    def start(self, job: Job) -> None:
        """Take a request. Raises SluiceError INVALID, in Triton's words, for one that fits into no sequence."""
        sequence = self._sequence_of(job)
        job.on_cancel = lambda: self._drop(job, sequence)
        self._by_job[job] = sequence
        sequence.line.append(job)
        self._touch(sequence)
        if SequenceFlag.END in job.request.sequence:
            self._forget(sequence)
        self._advance(sequence)

    def _sequence_of(self, job: Job) -> _Sequence:
        request = job.request
        begin = f"inference request to model '{self._model}' must specify"
        if request.batch_size > 1:
            raise _invalid(f"{begin} batch-size 1 due to requirements of sequence batcher")
        if not request.correlation_id:
            raise _invalid(f"{begin} a non-zero or non-empty correlation ID")
        found = self._known.get(request.correlation_id)
        if found is not None:
            # One that starts anew though the last has not ended goes on in its place, as in Triton.
            return found
        if SequenceFlag.START not in request.sequence:
            raise _invalid(
                f"inference request for sequence {_spelled(request.correlation_id)} to model '{self._model}' "
                "must specify the START flag on the first request of the sequence"
            )
        return self._open(request.correlation_id)

    def _open(self, correlation_id: int | str) -> _Sequence:
        taken = (each.id_tensor for each in self._known.values() if each.id_tensor is not None)
        opened = _Sequence(correlation_id, self._controls.id_tensor(correlation_id, taken))
        self._known[correlation_id] = opened
        lane = max(self._lanes, key=lambda each: (each.num_free > 0, each.batcher.is_ready, each.num_free))
        if lane.num_free:
            self._place(opened, lane)
        else:
            self._waiting.append(opened)
        return opened

    def _place(self, sequence: _Sequence, lane: _Lane) -> None:
        lane.num_free -= 1
        sequence.lane = lane

    def _advance(self, sequence: _Sequence) -> None:
        """Hand the sequence's next request to its instance, if its turn has come."""
        if sequence.lane is None or sequence.current is not None or not sequence.line:
            return
        job = sequence.current = sequence.line.popleft()
        job.on_cancel = None
        request = job.request
        request.inputs = {**request.inputs, **self._controls.of(request.sequence, sequence.id_tensor)}
        sequence.lane.batcher.start(job)

    def finished(self, job: Job) -> None:
        """A request of whichever sequence is over."""
        sequence = self._by_job.pop(job, None)
        if sequence is None:
            return
        if sequence.current is job:
            sequence.current = None
        if job.is_cancelled and not job.executed_batch_size:
            self._break(sequence)
        elif sequence.is_broken or SequenceFlag.END in job.request.sequence:
            self._leave(sequence)
        else:
            self._touch(sequence)
            self._advance(sequence)

    def _drop(self, job: Job, sequence: _Sequence) -> None:
        sequence.line.remove(job)
        job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))

    def _break(self, sequence: _Sequence) -> None:
        """Let nothing of the sequence follow."""
        sequence.is_broken = True
        self._forget(sequence)
        left, sequence.line = sequence.line, deque()
        for job in left:
            self._by_job.pop(job, None)
            job.on_cancel = None
            job.fail(SluiceError(ErrorCode.CANCELLED, "a request of the same sequence was cancelled"))
        if sequence.current is None:
            self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        """Forget a sequence, and give its place to the one that waits for longest."""
        self._forget(sequence)
        lane, sequence.lane = sequence.lane, None
        if lane is None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            return
        lane.num_free += 1
        if self._waiting:
            following = self._waiting.popleft()
            self._place(following, lane)
            self._advance(following)

    def _forget(self, sequence: _Sequence) -> None:
        """The next request with its id must begin another."""
        if self._known.get(sequence.correlation_id) is sequence:
            del self._known[sequence.correlation_id]

    def _touch(self, sequence: _Sequence) -> None:
        sequence.touched_ns = perf_counter_ns()
        if self._known.get(sequence.correlation_id) is sequence:
            self._known.move_to_end(sequence.correlation_id)
            self._wakeup.at(next(iter(self._known.values())).touched_ns + self._idle_ns)

    def _end_idle(self) -> None:
        now = perf_counter_ns()
        while self._known:
            oldest = next(iter(self._known.values()))
            if oldest.touched_ns + self._idle_ns > now:
                self._wakeup.at(oldest.touched_ns + self._idle_ns)
                return
            if oldest.is_busy:
                self._touch(oldest)
            else:
                self._leave(oldest)

    def close(self, error: SluiceError) -> None:
        """End in `error` what waits for its turn."""
        self._wakeup.cancel()
        self._known.clear()
        self._waiting.clear()
        held = [job for job, sequence in self._by_job.items() if sequence.current is not job]
        for job in held:
            self._by_job[job].line.clear()
        for job in held:
            del self._by_job[job]
            job.on_cancel = None
            job.fail(error)


def _spelled(correlation_id: int | str) -> str:
    return correlation_id if isinstance(correlation_id, str) else str(correlation_id & 0xFFFF_FFFF_FFFF_FFFF)


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
