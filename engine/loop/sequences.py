"""The sequences that run: how they start, are charged, preempted and ended, and the events of that."""

import logging
import math
from collections.abc import Callable

from sluice.engine.frames import request_failed
from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.loop.intake import Intake
from sluice.engine.loop.recorder import StepRecorder
from sluice.engine.loop.step import Failure, Outcome, take_event
from sluice.engine.scheduling.admission import deadline_error
from sluice.engine.scheduling.planner import StepPlan
from sluice.engine.sequence import NO_ROW, Sequence
from sluice.engine.speculation.drafter import Drafter
from sluice.engine.types import FinishReason, RequestFailed, TokenEvent
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

CHARGED_TOKENS = 16
"""Output is charged to its tenant in pieces of this size: one by one it would take a tenth of the step's own time."""


class RunningSequences:
    """Owns the sequences that run, and takes them from the intake and back. Used by the engine's thread alone."""

    def __init__(
        self,
        intake: Intake,
        kv: KvCacheManager,
        recorder: StepRecorder,
        clock: Callable[[], float],
        drafter: Drafter | None,
    ) -> None:
        """`drafter` is None without speculation, and may become so."""
        self.drafter = drafter
        self.running: dict[int, Sequence] = {}
        self.events: list[TokenEvent] = []
        self.failures: list[RequestFailed] = []
        """The events and failures of the next frame."""
        self._intake = intake
        self._kv = kv
        self._recorder = recorder
        self._clock = clock

    @property
    def num_reserved_blocks(self) -> int:
        """The blocks that running sequences use or may still need. A shared block counts once."""
        missing = sum(s.worst_case_blocks - s.num_allocated_blocks for s in self.running.values())
        return self._kv.pool.num_used + missing

    def take_frame(self) -> tuple[list[TokenEvent], list[RequestFailed]]:
        """Return the events and failures since the last call."""
        taken = self.events, self.failures
        self.events, self.failures = [], []
        return taken

    # -- beginnings

    def start(self, sequence: Sequence) -> None:
        """Run a sequence that was admitted, and whose prefix the cache has looked up."""
        self._intake.queue.admit(sequence)
        self.running[sequence.stream_id] = sequence
        counters = self._recorder.counters
        if sequence.was_preempted:
            if sequence.timing is not None:
                sequence.timing.resume(self._clock())
            counters.recomputed_tokens += max(sequence.num_discarded - sequence.num_computed, 0)
            return
        if not sequence.has_sampling:
            sequence.start_sampling(self._intake.vocab_size, None)
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        counters.cached_tokens += sequence.num_cached_tokens
        self._intake.forecast.observe_prompt(sequence.num_prompt, sequence.num_cached_tokens)
        sequence.queue_s = self._clock() - sequence.submitted_at
        self._intake.forecast.record_wait(sequence, sequence.queue_s)
        self._recorder.record_wait(sequence.queue_s)
        self._recorder.record_tokens(sequence.tenant, sequence.num_prompt - sequence.num_cached_tokens, 0)

    def preempt(self, sequence: Sequence) -> None:
        """Release the blocks of a running sequence. It resumes before new sequences of its priority start."""
        del self.running[sequence.stream_id]
        sequence.num_discarded, sequence.was_preempted = sequence.num_computed, True
        sequence.drafts = []
        if sequence.timing is not None:
            sequence.timing.pause(self._clock())
        sequence.may_return, sequence.return_deadline = True, math.inf
        self._kv.release(sequence)
        if self.drafter is not None:
            self.drafter.forget(sequence.stream_id)
        self._intake.queue.requeue(sequence)
        self._recorder.counters.preemptions += 1

    # -- a step that has run

    @staticmethod
    def advance(plan: StepPlan[Sequence]) -> None:
        """Count what the sequences of a plan compute."""
        for sequence in plan.decode:
            sequence.num_computed += 1
        for chunk in plan.prefill:
            chunk.sequence.num_computed += chunk.num_tokens

    def note_computed(self, plan: StepPlan[Sequence]) -> None:
        """Note what a step has computed, and the prefills that are complete with it. Its tokens come after that."""
        recorder = self._recorder
        # the last token of a prompt whose other tokens were in the cache
        complete = [sequence for sequence in plan.decode if sequence.num_output == 0]
        num_prompt = len(complete)
        for chunk in plan.prefill:
            sequence = chunk.sequence
            if sequence.timing is not None:
                sequence.timing.add_chunk(recorder.run_began, recorder.run_ended, chunk.num_tokens)
            if not sequence.was_preempted:
                num_prompt += chunk.num_tokens
            if sequence.num_output == 0 and sequence.num_computed == sequence.num_tokens:
                complete.append(sequence)
        recorder.counters.prompt_tokens += num_prompt
        now = self._clock() if complete else 0.0
        for sequence in complete:
            recorder.record_prefill(now - sequence.submitted_at - sequence.queue_s)

    def end_step(self, plan: StepPlan[Sequence], outcomes: list[Outcome], failures: list[Failure]) -> None:
        """End a step that gave sequences tokens, and others errors."""
        for sequence, error in failures:  # before indexing, so that no sequence shares what gave no finite logits
            self.fail(sequence, error)
        self._kv.index_full_blocks((*plan.decode, *(chunk.sequence for chunk in plan.prefill)))
        self._take_outcomes(outcomes)

    def _take_outcomes(self, outcomes: list[Outcome]) -> None:
        """Make the events of sequences that got tokens, and end those that are finished."""
        events, now, counters = self.events, self._clock(), self._recorder.counters
        for sequence, reason in outcomes:
            counters.generation_tokens += len(sequence.fresh_token_ids)
            if reason is None:
                events.append(take_event(sequence, None, now))
                if sequence.num_output - sequence.num_charged >= CHARGED_TOKENS:
                    self._charge(sequence)
            else:
                self._intake.forecast.observe_end(sequence)
                self.finish(sequence, reason)

    def _charge(self, sequence: Sequence) -> None:
        """Charge the output since the last charge to the tenant."""
        num_tokens = sequence.num_output - sequence.num_charged
        self._intake.queue.charge(sequence, num_tokens)
        self._recorder.record_tokens(sequence.tenant, 0, num_tokens)
        sequence.num_charged = sequence.num_output

    # -- endings

    def cancel(self, stream_id: int) -> None:
        """End a sequence, waiting or running. An unknown one is no error."""
        sequence = self.running.get(stream_id) or self._intake.get(stream_id)
        if sequence is not None:
            if stream_id in self.running:  # a stop string cancels too, so this is an ending like any other
                self._intake.forecast.observe_end(sequence, is_cancelled=True)
            else:
                self._intake.forecast.observe_leaving(sequence, self._clock() - sequence.submitted_at)
            self.finish(sequence, FinishReason.CANCELLED)

    def expire(self, now: float) -> None:
        """Fail the sequences that are past a deadline."""
        running = [sequence for sequence in self.running.values() if now >= sequence.deadline]
        for sequence in [*self._intake.expired(now), *running]:
            self._recorder.counters.timeouts += 1
            self.fail(sequence, deadline_error(sequence, now))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with a reason."""
        self._release(sequence)
        self.events.append(take_event(sequence, reason, self._clock()))

    def fail(self, sequence: Sequence, error: SluiceError) -> None:
        """End a sequence with an error."""
        self._release(sequence)
        self.failures.append(request_failed(sequence.stream_id, error))

    def fail_step(self, plan: StepPlan[Sequence]) -> None:
        """Log the exception of a step, and fail its sequences, no others."""
        log.exception("step %d failed; its sequences end in an error", self._recorder.counters.steps)
        self._kv.pool.take_reclaimed()  # the step may have written to them
        error = SluiceError(ErrorCode.INTERNAL, "the engine failed while it worked on this request")
        admitted = (candidate.sequence for candidate in plan.admitted)
        for sequence in {*plan.decode, *admitted, *(chunk.sequence for chunk in plan.prefill)}:
            if sequence.stream_id in self.running or self._intake.queue.get(sequence.stream_id) is not None:
                self.fail(sequence, error)

    def _release(self, sequence: Sequence) -> None:
        """Remove the sequence from the engine. Its blocks are free for the next step."""
        if sequence.stream_id in self.running:
            self._charge(sequence)
        self._intake.remove(sequence.stream_id)
        self.running.pop(sequence.stream_id, None)
        if self.drafter is not None:
            self.drafter.forget(sequence.stream_id)
        if sequence.table_row != NO_ROW:
            self._kv.release(sequence)
