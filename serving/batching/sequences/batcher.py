"""The sequence batcher: it finds each request's sequence, gives sequences slots, and runs their requests in order."""

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.batching.batcher import Batcher
from sluice.serving.batching.plan import BatchKeys, SequenceKeys, read_oldest_policy
from sluice.serving.batching.queue import Wakeup
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.sequences.inputs import ControlInputs, StateTensors, read_initial_states
from sluice.serving.batching.sequences.sequence import LiveSequences, RequestSequence, SlotAssigner, correlation_key
from sluice.serving.batching.sequences.slots import (
    Admit,
    DirectBatcher,
    GuardedInstance,
    OldestBatcher,
    SlotBatcher,
    read_direct_policy,
)
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse, SequenceFlag
from sluice.serving.spec import ModelSource, ModelSpec

_NS_PER_US = 1000
DEFAULT_IDLE_US = 1_000_000
"""Triton's default of `max_sequence_idle_microseconds`."""
_NO_NAMES: frozenset[str] = frozenset()


class _Member(NamedTuple):
    """A request's sequence, and the states that its client did not request."""

    sequence: RequestSequence
    hidden: frozenset[str]


class SequenceBatcher:
    """Gives each sequence a slot on an instance until it ends, is idle for too long, or loses a request or its state.

    A sequence waits in the backlog while no slot is free. An iterative sequence is a single request that the model may
    run any number of times.
    """

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        instances: Sequence[Instance],
        on_executed: Callable[[list[InferJob]], None],
        limiter: RateLimiter | None = None,
        on_released: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads files. Raises as `read_initial_states`.

        `on_executed` is called with each batch that has run, `on_released` when a sequence has left its instance.
        """
        given = source.config.sequence_batching
        self._model = spec.name
        self._is_iterative = given.iterative_sequence
        self._controls = ControlInputs(source.config)
        self._states = StateTensors(spec, read_initial_states(source))
        self._live = LiveSequences((given.max_sequence_idle_microseconds or DEFAULT_IDLE_US) * _NS_PER_US)
        self._members: dict[InferJob, _Member] = {}
        self._numbers = itertools.count(1)
        self._wakeup = Wakeup(self._expire)
        self._build_batchers = partial(
            build_slot_batchers,
            source.config,
            keys=SequenceKeys(spec),
            controls=self._controls,
            admit=self._admit,
            on_executed=on_executed,
            limiter=limiter,
        )
        self.batchers = self._build_batchers(instances)
        """One for each instance. They are closed after the sequence batcher, and end the running jobs."""
        self._slots = SlotAssigner(self.batchers, self._advance, on_released)

    def change_instances(self, added: Sequence[Instance], removed: Collection[Instance]) -> list[SlotBatcher]:
        """Start later sequences on other instances. The caller closes the returned batchers, of `removed`.

        Their sequences continue there, until the last one has released its slot.
        """
        retired = [each for each in self.batchers if each.instance in removed]
        self.batchers[:] = [*(each for each in self.batchers if each not in retired), *self._build_batchers(added)]
        self._slots.fill()
        return retired

    @property
    def num_held(self) -> int:
        """Number of requests that wait for an earlier one of their sequence, or for a slot."""
        return sum(1 for job, member in self._members.items() if member.sequence.current is not job)

    def start(self, job: InferJob) -> None:
        """Accept a request. Raises INVALID for one that fits no sequence, UNAVAILABLE where its state was lost."""
        sequence = self._find_or_open(job.request)
        hidden = self._states.request_outputs(job.request) if self._states.has_states else _NO_NAMES
        self._members[job] = _Member(sequence, hidden)
        if self._is_iterative:
            job.on_reschedule = partial(self._run_again, job, sequence)
        job.on_cancel = partial(self._drop, job, sequence)
        sequence.queue.append(job)
        self._touch(sequence)
        self._slots.backlog.limit(sequence, job.request, sequence.used_ns)
        if deadline_ns := sequence.deadline_ns:
            self._wakeup.at(deadline_ns)
        sequence.is_ended = SequenceFlag.END in job.request.sequence
        self._advance(sequence)

    def _find_or_open(self, request: InferRequest) -> RequestSequence:
        if request.batch_size > 1:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not request.correlation_id:
            if not self._is_iterative:
                raise invalid_argument(
                    f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
                )
            request.correlation_id = next(number for number in self._numbers if self._live.get(number) is None)
            request.sequence = SequenceFlag.START
        found = self._live.get(request.correlation_id)
        if SequenceFlag.START in request.sequence:
            # A new start follows the last sequence of that id, ended or not: the model knows them by the same id.
            return found if found is not None and not found.lost_reason else self._open(request.correlation_id)
        if found is None or found.is_ended:
            raise invalid_argument(
                f"inference request for sequence {correlation_key(request.correlation_id)} to model '{self._model}' "
                "must specify the START flag on the first request of the sequence"
            )
        if found.lost_reason:
            raise SluiceError(ErrorCode.UNAVAILABLE, found.lost_reason)
        return found

    def _open(self, correlation_id: int | str) -> RequestSequence:
        opened = RequestSequence(correlation_id, self._controls.id_tensor(correlation_id, self._live.id_tensors()))
        self._live.add(opened)
        self._slots.assign(opened)
        return opened

    def _advance(self, sequence: RequestSequence) -> None:
        """Hand the sequence's next request to its instance, unless one is there already."""
        if sequence.slot is None or sequence.current is not None or not sequence.queue:
            return
        request = sequence.queue[0].request
        if SequenceFlag.START in request.sequence:
            sequence.states = self._states.initial
            sequence.incarnation = None
        elif sequence.has_lost_state:
            self._lose(sequence)
            return
        job = sequence.current = sequence.queue.popleft()
        job.on_cancel = None
        controls = self._controls.of(request.sequence, sequence.id_tensor)
        request.inputs = {**request.inputs, **controls, **sequence.states}
        sequence.slot.batcher.start(job, sequence.slot.number)

    def _admit(self, job: InferJob) -> bool:
        """Return whether a request may run: just before it does, its sequence's state must still be there."""
        member = self._members.get(job)
        if member is None or member.sequence.slot is None:  # of a warm-up
            return True
        sequence, batcher = member.sequence, member.sequence.slot.batcher
        if SequenceFlag.START in job.request.sequence:
            # An instance without a process runs the request in its next one.
            sequence.incarnation = batcher.incarnation if batcher.is_ready else None
        elif sequence.has_lost_state:
            job.fail(SluiceError(ErrorCode.UNAVAILABLE, self._lost_reason(sequence)))
            return False
        return True

    def responded(self, job: InferJob, response: InferResponse) -> None:
        """Keep the states of a response, and remove those that the client did not request."""
        member = self._members.get(job)
        if member is None or not self._states.has_states or response.error is not None:
            return
        member.sequence.new_states |= self._states.extract(response.outputs)
        if member.hidden:
            response.outputs = [each for each in response.outputs if each.name not in member.hidden]

    def finished(self, job: InferJob) -> None:
        """Note the end of a request of any sequence."""
        member = self._members.pop(job, None)
        if member is None:
            return
        if member.sequence.current is job:
            self._continue(job, member.sequence)
        elif self._is_iterative:
            self._advance_or_remove(member.sequence)
        else:
            self._break(member.sequence)

    def _continue(self, job: InferJob, sequence: RequestSequence) -> None:
        """Go on after the end of the sequence's present request."""
        sequence.current = None
        if sequence.slot is not None:
            sequence.slot.batcher.finished(job)
        if job.outcome is None:
            sequence.commit_states()
        sequence.new_states = {}
        is_lost = not sequence.check_incarnation() if job.executed_batch_size else sequence.has_lost_state
        if is_lost:
            self._lose(sequence)
        elif SequenceFlag.END in job.request.sequence or sequence.is_broken:
            self._end(sequence)
        elif self._leaves_gap(job):
            self._break(sequence)
        else:
            self._touch(sequence)
            self._advance_or_remove(sequence)

    def _advance_or_remove(self, sequence: RequestSequence) -> None:
        """Run the next request. An iterative sequence without one has ended."""
        if self._is_iterative and not sequence.is_busy:
            self._remove(sequence)
        else:
            self._advance(sequence)

    def _leaves_gap(self, job: InferJob) -> bool:
        """Return whether the sequence's state lacks the effect of a cancelled request."""
        return job.is_cancelled and not self._is_iterative and (not job.executed_batch_size or self._states.has_states)

    def _run_again(self, job: InferJob, sequence: RequestSequence) -> None:
        """Queue the request once more, behind those of other sequences, as the model asks."""
        job.request.sequence = SequenceFlag.NONE
        sequence.commit_states()
        sequence.current = None
        sequence.queue.appendleft(job)
        job.on_cancel = partial(self._drop, job, sequence)
        self._touch(sequence)
        if sequence.check_incarnation():
            self._advance(sequence)
        else:
            self._lose(sequence)

    def _drop(self, job: InferJob, sequence: RequestSequence) -> None:
        sequence.queue.remove(job)
        job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))

    def _end(self, sequence: RequestSequence) -> None:
        """End a sequence. Where its next start is queued already, it waits for a slot behind other sequences."""
        sequence.is_broken = False
        if not sequence.queue:
            self._remove(sequence)
            return
        self._touch(sequence)
        self._slots.reassign(sequence)

    def _break(self, sequence: RequestSequence) -> None:
        """End a sequence that misses a request: fail its queued requests, and accept nothing but a new start."""
        sequence.is_broken = sequence.is_ended = True
        self._fail_queued(sequence, SluiceError(ErrorCode.CANCELLED, "a request of the same sequence was cancelled"))
        if sequence.current is None:
            self._remove(sequence)

    def _lose(self, sequence: RequestSequence) -> None:
        """Fail the requests that need the lost state, up to the next start in the queue, which goes on."""
        reason = self._lost_reason(sequence)
        sequence.is_broken = False
        while sequence.queue and SequenceFlag.START not in sequence.queue[0].request.sequence:
            self._fail(sequence.queue.popleft(), SluiceError(ErrorCode.UNAVAILABLE, reason))
        if sequence.queue:
            self._advance(sequence)
            return
        if self._is_iterative or sequence.is_ended:
            self._live.discard(sequence)
        sequence.lost_reason = reason
        self._touch(sequence)
        self._slots.release(sequence)

    def _lost_reason(self, sequence: RequestSequence) -> str:
        assert sequence.slot is not None
        instance = sequence.slot.batcher.instance.name
        if self._is_iterative:
            return f"the state of the request was lost with a process of {instance}: send it again"
        return (
            f"the state of sequence {correlation_key(sequence.correlation_id)} of model '{self._model}' was lost with "
            f"a process of {instance}: begin the sequence again, with the START flag"
        )

    def _remove(self, sequence: RequestSequence) -> None:
        """Remove a sequence, and give its slot to the one that waits longest."""
        self._live.discard(sequence)
        self._slots.backlog.discard(sequence)
        self._slots.release(sequence)

    def _touch(self, sequence: RequestSequence) -> None:
        self._live.touch(sequence)
        if idle_ns := self._live.next_idle_ns():
            self._wakeup.at(idle_ns)

    def _expire(self) -> None:
        """Remove idle sequences, and fail those that have waited too long for a slot."""
        now_ns = perf_counter_ns()
        for sequence in self._live.find_idle(now_ns):
            self._remove(sequence)
        expired = SluiceError(ErrorCode.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
        for sequence in self._slots.backlog.take_expired(now_ns):
            self._live.discard(sequence)
            self._fail_queued(sequence, expired)
        for time_ns in (self._live.next_idle_ns(), self._slots.backlog.next_deadline_ns()):
            if time_ns:
                self._wakeup.at(time_ns)

    def _fail_queued(self, sequence: RequestSequence, error: SluiceError) -> None:
        while sequence.queue:
            self._fail(sequence.queue.popleft(), error)

    def _fail(self, job: InferJob, error: SluiceError) -> None:
        """Fail a request that has not run. The caller updates its sequence."""
        self._members.pop(job, None)
        job.on_cancel = None
        job.fail(error)

    def close(self, error: SluiceError) -> None:
        """Fail queued requests with `error`."""
        self._wakeup.cancel()
        self._live.clear()
        self._slots.backlog.clear()
        for sequence in {member.sequence for member in self._members.values()}:
            self._fail_queued(sequence, error)


def build_slot_batchers(
    config: ModelConfig,
    instances: Sequence[Instance],
    keys: BatchKeys,
    controls: ControlInputs,
    admit: Admit,
    on_executed: Callable[[list[InferJob]], None],
    limiter: RateLimiter | None,
) -> list[SlotBatcher]:
    """Return a batcher for each instance, of the configured strategy; the default is direct."""
    if not config.sequence_batching.HasField("oldest"):
        policy = read_direct_policy(config)
        return [DirectBatcher(each, policy, keys, controls, admit, on_executed, limiter) for each in instances]
    oldest = config.sequence_batching.oldest
    num_slots = oldest.max_candidate_sequences or max(config.max_batch_size, 1)
    batch_policy = read_oldest_policy(config)
    return [
        OldestBatcher(
            each,
            num_slots,
            Batcher(batch_policy, keys, [GuardedInstance(each, admit)], on_executed, limiter),
            preserves_order=oldest.preserve_ordering,
        )
        for each in instances
    ]
