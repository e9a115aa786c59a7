"""Which sequence a request belongs to, where that has its place, and whose turn it is."""

import itertools
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Items
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.batching.batcher import Batcher
from serving.batching.plan import BatchKeys, SequenceKeys, read_oldest_policy
from serving.batching.queue import Wakeup
from serving.batching.rate_limiter import RateLimiter
from serving.batching.sequences.direct import DirectBatcher, read_direct_policy
from serving.batching.sequences.inputs import ControlInputs, StateTensors, initial_states
from serving.batching.sequences.oldest import GuardedInstance, OldestBatcher
from serving.batching.sequences.sequence import (
    LiveSequences,
    RequestSequence,
    SlotAssigner,
    batch_size_error,
    cancelled_error,
    describe_lost_request,
    describe_lost_sequence,
    missing_id_error,
    not_started_error,
    sibling_cancelled_error,
    slot_timeout_error,
    state_lost_error,
)
from serving.batching.sequences.slots import Admit, SlotBatcher
from serving.instance import Instance
from serving.job import InferJob
from serving.request import InferRequest, InferResponse, SequenceFlag
from serving.spec import ModelSource, ModelSpec
from sluice.errors import SluiceError

_NS_PER_US = 1000
_DEFAULT_IDLE_US = 1_000_000
"""Triton's `max_sequence_idle_microseconds` where a configuration has none."""
_NO_NAMES: frozenset[str] = frozenset()


class _Member(NamedTuple):
    """What is known of a request: its sequence, and the states that its client did not ask for."""

    sequence: RequestSequence
    hidden: frozenset[str]


class SequenceBatcher:
    """Gives sequences a place on an instance until they end, are idle for too long, or lose a request or their state.

    A sequence that finds no place waits, and takes the first that becomes free. Iterative sequences are requests that
    the model runs as often as it wants, each a sequence by itself.
    """

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        instances: Items[Instance],
        on_executed: Callable[[list[InferJob]], None],
        limiter: RateLimiter | None = None,
    ) -> None:
        """At least one of `instances`. `on_executed` is told of each batch that has run.

        Reads the files of initial states. Raises what `initial_states` raises.
        """
        given = source.config.sequence_batching
        self._model = spec.name
        self._is_iterative = given.iterative_sequence
        self._controls = ControlInputs(source.config)
        self._states = StateTensors(spec, initial_states(source.config, source.folder))
        self._known = LiveSequences((given.max_sequence_idle_microseconds or _DEFAULT_IDLE_US) * _NS_PER_US)
        self._members: dict[InferJob, _Member] = {}
        self._numbers = itertools.count(1)
        self._wakeup = Wakeup(self._look)
        self.lanes = build_slot_batchers(
            source.config, instances, SequenceKeys(spec), self._controls, self._admit, on_executed, limiter
        )
        """To be closed after it: what runs ends with them."""
        self._places = SlotAssigner(self.lanes, self._advance)

    @property
    def num_held(self) -> int:
        """Requests that wait for their sequence's turn."""
        return sum(1 for job, member in self._members.items() if member.sequence.current is not job)

    def start(self, job: InferJob) -> None:
        """Take a request.

        Raises SluiceError INVALID, in Triton's words, for one that fits into no sequence, UNAVAILABLE for one whose
        sequence was lost.
        """
        sequence = self._sequence_of(job.request)
        hidden = self._states.ask(job.request) if self._states.are_any else _NO_NAMES
        self._members[job] = _Member(sequence, hidden)
        if self._is_iterative:
            job.on_reschedule = partial(self._run_again, job, sequence)
        self._hold(job, sequence)
        sequence.line.append(job)
        self._touch(sequence)
        self._places.backlog.limit(sequence, job.request, sequence.touched_ns)
        if deadline_ns := sequence.deadline_ns:
            self._wakeup.at(deadline_ns)
        sequence.is_ended = SequenceFlag.END in job.request.sequence
        self._advance(sequence)

    def _hold(self, job: InferJob, sequence: RequestSequence) -> None:
        job.on_cancel = partial(self._drop, job, sequence)

    def _sequence_of(self, request: InferRequest) -> RequestSequence:
        if request.batch_size > 1:
            raise batch_size_error(self._model)
        if not request.correlation_id:
            if not self._is_iterative:
                raise missing_id_error(self._model)
            request.correlation_id = next(number for number in self._numbers if self._known.get(number) is None)
            request.sequence = SequenceFlag.START
        found = self._known.get(request.correlation_id)
        if SequenceFlag.START in request.sequence:
            # One that begins anew follows the last one, ended or not: the model knows them by the same id.
            return found if found is not None and not found.loss else self._open(request.correlation_id)
        if found is None or found.is_ended:
            raise not_started_error(self._model, request.correlation_id)
        if found.loss:
            raise state_lost_error(found.loss)
        return found

    def _open(self, correlation_id: int | str) -> RequestSequence:
        opened = RequestSequence(correlation_id, self._controls.id_tensor(correlation_id, self._known.id_tensors()))
        self._known.add(opened)
        self._places.ask(opened)
        return opened

    def _advance(self, sequence: RequestSequence) -> None:
        """Hand the sequence's next request to its instance, if its turn has come."""
        if sequence.place is None or sequence.current is not None or not sequence.line:
            return
        request = sequence.line[0].request
        if SequenceFlag.START in request.sequence:
            sequence.states = self._states.initial
            sequence.life = None
        elif sequence.has_lost_state:
            self._lose(sequence)
            return
        job = sequence.current = sequence.line.popleft()
        job.on_cancel = None
        controls = self._controls.of(request.sequence, sequence.id_tensor)
        request.inputs = {**request.inputs, **controls, **sequence.states}
        sequence.place.lane.start(job, sequence.place.slot)

    def _admit(self, job: InferJob) -> bool:
        """A request's last moment before it runs: what it goes on from must still be there."""
        member = self._members.get(job)
        if member is None or member.sequence.place is None:  # a warm-up's
            return True
        sequence, lane = member.sequence, member.sequence.place.lane
        if SequenceFlag.START in job.request.sequence:
            # One that is given to an instance without a process runs in the next one.
            sequence.life = lane.life if lane.is_ready else None
        elif sequence.has_lost_state:
            job.fail(state_lost_error(self._loss_of(sequence)))
            return False
        return True

    def responded(self, job: InferJob, response: InferResponse) -> None:
        """Keep the states that come with a response, and take them out of it."""
        member = self._members.get(job)
        if member is None or not self._states.are_any or response.error is not None:
            return
        member.sequence.fresh_states |= self._states.taken(response.outputs)
        if member.hidden:
            response.outputs = [each for each in response.outputs if each.name not in member.hidden]

    def finished(self, job: InferJob) -> None:
        """A request of whichever sequence is over."""
        member = self._members.pop(job, None)
        if member is None:
            return
        if member.sequence.current is job:
            self._go_on(job, member.sequence)
        elif self._is_iterative:
            self._turn_to_next(member.sequence)
        else:
            self._break(member.sequence)

    def _go_on(self, job: InferJob, sequence: RequestSequence) -> None:
        """The sequence's present request is over."""
        sequence.current = None
        if sequence.place is not None:
            sequence.place.lane.finished(job)
        self._keep_states(job, sequence)
        is_lost = not sequence.notice_life() if job.executed_batch_size else sequence.has_lost_state
        if is_lost:
            self._lose(sequence)
        elif SequenceFlag.END in job.request.sequence or sequence.is_broken:
            self._end(sequence)
        elif self._leaves_gap(job):
            self._break(sequence)
        else:
            self._touch(sequence)
            self._turn_to_next(sequence)

    def _turn_to_next(self, sequence: RequestSequence) -> None:
        """An iterative sequence is over when it has no request."""
        if self._is_iterative and not sequence.is_busy:
            self._leave(sequence)
        else:
            self._advance(sequence)

    def _keep_states(self, job: InferJob, sequence: RequestSequence) -> None:
        """A request that failed changes nothing."""
        if job.outcome is None:
            sequence.commit_states()
        sequence.fresh_states = {}

    def _leaves_gap(self, job: InferJob) -> bool:
        """Whether the sequence misses what a cancelled request would have made of its state."""
        return job.is_cancelled and not self._is_iterative and (not job.executed_batch_size or self._states.are_any)

    def _run_again(self, job: InferJob, sequence: RequestSequence) -> None:
        """The model wants the request once more: it waits for its turn among those of other sequences."""
        job.request.sequence = SequenceFlag.NONE
        sequence.commit_states()
        sequence.current = None
        sequence.line.appendleft(job)
        self._hold(job, sequence)
        self._touch(sequence)
        if sequence.notice_life():
            self._advance(sequence)
        else:
            self._lose(sequence)

    def _drop(self, job: InferJob, sequence: RequestSequence) -> None:
        sequence.line.remove(job)
        job.fail(cancelled_error())

    def _end(self, sequence: RequestSequence) -> None:
        """Where it begins anew already, that waits for its turn behind other sequences."""
        sequence.is_broken = False
        if not sequence.line:
            self._leave(sequence)
            return
        self._touch(sequence)
        self._places.change(sequence)

    def _break(self, sequence: RequestSequence) -> None:
        """Let nothing of the sequence follow; one that begins anew waits until its present request is over."""
        sequence.is_broken = sequence.is_ended = True
        self._fail_line(sequence, sibling_cancelled_error())
        if sequence.current is None:
            self._leave(sequence)

    def _lose(self, sequence: RequestSequence) -> None:
        """Let nothing of the sequence run on a state that is not its own. Where it begins anew, that is its way on."""
        loss = self._loss_of(sequence)
        sequence.is_broken = False
        while sequence.line and SequenceFlag.START not in sequence.line[0].request.sequence:
            self._fail(sequence.line.popleft(), state_lost_error(loss))
        if sequence.line:
            self._advance(sequence)
            return
        if self._is_iterative or sequence.is_ended:
            self._known.forget(sequence)
        sequence.loss = loss
        self._touch(sequence)
        self._places.vacate(sequence)

    def _loss_of(self, sequence: RequestSequence) -> str:
        assert sequence.place is not None
        instance = sequence.place.lane.instance.name
        if self._is_iterative:
            return describe_lost_request(instance)
        return describe_lost_sequence(self._model, sequence.correlation_id, instance)

    def _leave(self, sequence: RequestSequence) -> None:
        """Forget a sequence, and give its place to the one that waits for longest."""
        self._known.forget(sequence)
        self._places.backlog.discard(sequence)
        self._places.vacate(sequence)

    def _touch(self, sequence: RequestSequence) -> None:
        self._known.touch(sequence)
        if idle_ns := self._known.next_idle_ns():
            self._wakeup.at(idle_ns)

    def _look(self) -> None:
        """End what is idle for too long, and what has waited for a place for too long."""
        now_ns = perf_counter_ns()
        for sequence in self._known.idle(now_ns):
            self._leave(sequence)
        for sequence in self._places.backlog.expired(now_ns):
            self._known.forget(sequence)
            self._fail_line(sequence, slot_timeout_error())
        for time_ns in (self._known.next_idle_ns(), self._places.backlog.next_deadline_ns()):
            if time_ns:
                self._wakeup.at(time_ns)

    def _fail_line(self, sequence: RequestSequence, error: SluiceError) -> None:
        while sequence.line:
            self._fail(sequence.line.popleft(), error)

    def _fail(self, job: InferJob, error: SluiceError) -> None:
        """End a request that has not run, which its sequence hears of from who calls this."""
        self._members.pop(job, None)
        job.on_cancel = None
        job.fail(error)

    def close(self, error: SluiceError) -> None:
        """End in `error` what waits for its turn."""
        self._wakeup.cancel()
        self._known.clear()
        self._places.backlog.clear()
        for sequence in {member.sequence for member in self._members.values()}:
            self._fail_line(sequence, error)


def build_slot_batchers(
    config: ModelConfig,
    instances: Sequence[Instance],
    keys: BatchKeys,
    controls: ControlInputs,
    admit: Admit,
    on_executed: Callable[[list[InferJob]], None],
    limiter: RateLimiter | None,
) -> list[SlotBatcher]:
    """One for each of `instances`. Where no strategy is chosen it is the direct one."""
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
