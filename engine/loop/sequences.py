"""Sequences from the submit to the end: requests are checked, their grammars compiled and their sequences queued
(`Intake`); those that run start, are charged, preempted and ended (`RunningSequences`)."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.engine.config import EngineConfig
from sluice.engine.frames import Submit, request_failed
from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.loop.recorder import Step, StepRecorder
from sluice.engine.loop.step import Failure, Outcome, take_event
from sluice.engine.sampling.state import Constraint
from sluice.engine.scheduling.admission import CHARGED_TOKENS, AdmissionController, Backlog, deadline_error
from sluice.engine.scheduling.planner import StepPlan
from sluice.engine.sequence import NO_ROW, Sequence
from sluice.engine.speculation.drafter import Drafter
from sluice.engine.types import EngineInfo, FinishReason, Grammar, RequestFailed, TokenEvent
from sluice.engine.validation import check_request
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from sluice.engine.guidance.compiler import GrammarCompiler
    from sluice.engine.guidance.matching import CompiledGrammar


class Intake(AdmissionController[Sequence]):
    """The waiting queue, the grammars being compiled beside it, and the forecast. Used by the engine thread alone."""

    def __init__(self, info: EngineInfo, config: EngineConfig, clock: Callable[[], float]) -> None:
        super().__init__(info, config, clock)
        self._grammars = PendingGrammars(config.model_path, info)

    def __len__(self) -> int:
        return len(self.queue) + len(self._grammars)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.queue, *self._grammars])

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    @property
    def is_compiling(self) -> bool:
        """Whether a sequence waits for its grammar."""
        return len(self._grammars) > 0

    def observe_step(self, step: Step, seconds: float) -> None:
        """Let the forecast learn from a step that took so long, with the wait for it."""
        self.forecast.observe_step(step.num_seqs, step.num_prefill, seconds)
        self.forecast.pace.observe(step.num_prefill, step.runner_seconds)

    def get(self, stream_id: int) -> Sequence | None:
        """Return the sequence if it waits."""
        return self.queue.get(stream_id) or self._grammars.get(stream_id)

    def use(self, info: EngineInfo) -> None:
        """Check further requests against `info`, whose adapters have changed."""
        self._info = info

    def submit(
        self,
        command: Submit,
        running: Collection[Sequence],
        free_blocks: int,
        now: float,
        count_started: Callable[[Iterable[Sequence]], int],
        adapter: tuple[int, str] = (0, ""),
    ) -> None:
        """Queue a request; `free_blocks` is how many blocks no running sequence reserves, `count_started` returns how
        many of the given sequences, in order, the next step would take, and `adapter` is the runner's number of the
        request's adapter and its digest. Raises INVALID for a request that can never be served, OVERLOADED if
        the queue is full, DEADLINE if the wait would be too long. A request that a lost engine had accepted is not
        rejected for the queue."""
        request = command.request
        check_request(request, self._info)
        most = self._config.max_replayed_tokens
        sequence = Sequence(command.stream_id, request, self._info, now, *adapter, max_replayed_tokens=most)
        self.admit_to_queue(
            sequence,
            running,
            free_blocks,
            now,
            backlog=Backlog(
                len(self),
                self._info.max_num_seqs - len(running),
                lambda queued: count_started(chain(queued, self._grammars)),
            ),
            was_accepted=command.was_accepted,
            most_wait_s=command.most_wait_s,
        )
        if request.sampling.grammar is not None:
            self._grammars.add(sequence, request.sampling.grammar)
        else:
            self.queue.add(sequence)

    def enqueue_compiled(self) -> list[tuple[Sequence, SluiceError]]:
        """Queue the sequences whose grammar is compiled. Returns those whose grammar cannot be used."""
        failed: list[tuple[Sequence, SluiceError]] = []
        for sequence, outcome in self._grammars.take_done():
            try:
                if isinstance(outcome, SluiceError):
                    raise outcome
                sequence.start_sampling(self._info.vocab_size, outcome)
                self.queue.add(sequence)
            except SluiceError as error:
                failed.append((sequence, error))
        return failed

    def expired(self, now: float) -> list[Sequence]:
        """Return the waiting sequences that are past a deadline."""
        compiling = [s for s in self._grammars if now >= min(s.deadline, s.start_deadline)]
        return [*self.queue.expired(now), *compiling]

    def remove(self, stream_id: int) -> None:
        """Forget the sequence, whether it waits or runs. An unknown one is no error."""
        self.queue.remove(stream_id)
        self._grammars.remove(stream_id)

    def close(self) -> None:
        """End the threads that compile."""
        self._grammars.close()


class PendingGrammars:
    """Sequences whose grammar is being compiled. They wait beside the queue, so that they delay no other sequence. Used
    by the engine thread; the compiler's own threads do the work."""

    def __init__(self, model_path: str, info: EngineInfo) -> None:
        self._model_path = model_path
        self._info = info
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, tuple[Sequence, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _ in self._waiting.values()])

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        """Start to compile `grammar`, unless it is compiled already."""
        if self._compiler is None:
            from sluice.engine.guidance.compiler import GrammarCompiler  # loaded with the first grammar

            self._compiler = GrammarCompiler(Path(self._model_path), self._info.vocab_size, self._info.eos_token_ids)
        self._waiting[sequence.stream_id] = (sequence, self._compiler.compile(grammar))

    def get(self, stream_id: int) -> Sequence | None:
        entry = self._waiting.get(stream_id)
        return None if entry is None else entry[0]

    def remove(self, stream_id: int) -> None:
        self._waiting.pop(stream_id, None)

    def take_done(self) -> list[tuple[Sequence, Constraint | SluiceError]]:
        """Remove and return the sequences whose grammar is done, each with its constraint or the error."""
        done = [(sequence, future) for sequence, future in self._waiting.values() if future.done()]
        for sequence, _ in done:
            del self._waiting[sequence.stream_id]
        return [(sequence, _outcome(future)) for sequence, future in done]

    def close(self) -> None:
        """End the compiler's threads."""
        if self._compiler is not None:
            self._compiler.close()


def _outcome(future: "Future[CompiledGrammar]") -> Constraint | SluiceError:
    try:
        return future.result().constraint()
    except SluiceError as error:
        return error
    except Exception as error:
        return SluiceError(ErrorCode.INTERNAL, f"compiling the grammar failed: {error}")


log = logging.getLogger(__name__)


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
        self._recorder.record_tokens(sequence.tenant, 0, self._intake.charge_output(sequence))

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
