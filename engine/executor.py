"""The in-flight batching loop: drain, plan, apply, run, commit, emit.

One thread owns everything here: queue, sequences, block tables and free list. Others send commands.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Protocol

from engine.admission import check_queue
from engine.batch import build_batch, sampling_sequences
from engine.blocks import BlockPool, BlockTables, blocks_for
from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.frames import Cancel, Command, Shutdown, StepFrame, Submit, failed
from engine.planner import StepPlan, plan_step
from engine.policies import Limits
from engine.runners.base import FloatArray, Runner
from engine.sampling.sampler import sample
from engine.sequence import NO_SLOT, Sequence
from engine.types import EngineInfo, EngineStats, FinishReason, RequestFailed, TokenEvent
from engine.validation import check_request

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
"""An idle engine speaks at least this often; a silent one hangs."""


class CommandSource(Protocol):
    """Where commands come from."""

    def receive(self, timeout_s: float) -> list[Command]:
        """All commands waiting; with none, waits up to `timeout_s` for the first."""
        ...


class InflightExecutor:
    """Serves one runner. `run()` returns after a Shutdown command; `step()` is one turn of it."""

    def __init__(
        self, runner: Runner, config: EngineConfig, commands: CommandSource, emit: Callable[[StepFrame], None]
    ) -> None:
        self.info = engine_info(runner, config)
        self._runner = runner
        self._config = config
        self._commands = commands
        self._emit = emit
        self._limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, self.info.num_blocks)
        self._pool = BlockPool(self.info.num_blocks)
        self._tables = BlockTables(config.max_num_seqs, blocks_for(self.info.max_model_len, self.info.block_size))
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._events: list[TokenEvent] = []
        self._failures: list[RequestFailed] = []
        self._is_shut_down = False
        self._last_emit = 0.0
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._runner_seconds = self._overhead_seconds = 0.0

    def run(self) -> None:
        """Step until a Shutdown command. An exception that is no step's own ends the engine."""
        while not self._is_shut_down:
            self.step()

    def step(self) -> None:
        """One turn: wait for work if there is none, else run one batch and tell what it brought."""
        is_idle = not (self._running or self._waiting)
        commands = self._commands.receive(HEARTBEAT_S if is_idle else 0.0)
        started, runner_before = perf_counter(), self._runner_seconds
        self._obey(commands)
        plan = plan_step(self._running.values(), self._waiting.values(), self._limits)
        if not plan.is_empty:
            self._run_plan(plan)
        self._flush()
        if not plan.is_empty:
            self._overhead_seconds += perf_counter() - started - (self._runner_seconds - runner_before)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_used=self._pool.num_used,
            num_blocks_free=self._pool.num_free,
            num_blocks_reserved=sum(sequence.worst_case_blocks for sequence in self._running.values()),
            steps_total=self._steps,
            runner_seconds_total=self._runner_seconds,
            overhead_seconds_total=self._overhead_seconds,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
        )

    def check_invariants(self) -> None:
        """Assert that what is held adds up: for tests, and cheap enough for an idle engine."""
        self._pool.check()
        stats = self.stats()
        held = sum(self._tables.count(sequence.slot) for sequence in self._running.values())
        assert held == stats.num_blocks_used, f"{stats.num_blocks_used} blocks used, sequences hold {held}"
        assert held <= stats.num_blocks_reserved <= self.info.num_blocks, "over-committed"
        assert len(self._running) <= self._config.max_num_seqs

    # -- commands

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self._submit(command)
                case Cancel():
                    self._cancel(command.stream_id)
                case Shutdown():
                    self._is_shut_down = True
                    for stream_id in [*self._running, *self._waiting]:
                        self._cancel(stream_id)

    def _submit(self, command: Submit) -> None:
        try:
            check_request(command.request, self.info)
            check_queue(self._waiting.values(), self._running.values(), self._config, self._seconds_per_token())
        except SluiceError as error:
            self._failures.append(failed(command.stream_id, error))
            return
        self._waiting[command.stream_id] = Sequence(
            command.stream_id, command.request, self.info.eos_token_ids, self.info.vocab_size, self.info.block_size
        )

    def _cancel(self, stream_id: int) -> None:
        sequence = self._running.get(stream_id) or self._waiting.get(stream_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED, [])

    # -- one step

    def _run_plan(self, plan: StepPlan[Sequence]) -> None:
        try:
            self._apply(plan)
            logits = self._timed_run(plan)
            self._obey(self._commands.receive(0.0))
            self._commit(plan, logits)
        except Exception:
            log.exception("step %d failed; its sequences end in an error", self._steps)
            self._fail(plan)

    def _apply(self, plan: StepPlan[Sequence]) -> None:
        for sequence in plan.admitted:
            del self._waiting[sequence.stream_id]
            self._running[sequence.stream_id] = sequence
            sequence.slot = self._tables.open()
        for sequence in plan.decode:
            self._hold(sequence, sequence.num_computed + 1)
        for chunk in plan.prefill:
            self._hold(chunk.sequence, chunk.sequence.num_computed + chunk.num_tokens)

    def _hold(self, sequence: Sequence, num_tokens: int) -> None:
        """See that the sequence's blocks have room for `num_tokens`."""
        missing = blocks_for(num_tokens, self.info.block_size) - self._tables.count(sequence.slot)
        if missing > 0:
            self._tables.append(sequence.slot, self._pool.allocate(missing))

    def _timed_run(self, plan: StepPlan[Sequence]) -> FloatArray:
        batch = build_batch(plan, self._tables)
        started = perf_counter()
        logits = self._runner.run(batch)
        self._runner_seconds += perf_counter() - started
        self._steps += 1
        return logits

    def _commit(self, plan: StepPlan[Sequence], logits: FloatArray) -> None:
        sampling = sampling_sequences(plan)
        for sequence in plan.decode:
            sequence.num_computed += 1
        for chunk in plan.prefill:
            chunk.sequence.num_computed += chunk.num_tokens
            self._prompt_tokens += chunk.num_tokens
        if not sampling:
            return
        token_ids = sample(logits, [sequence.sampling for sequence in sampling]).tolist()
        self._generation_tokens += len(token_ids)
        for sequence, token_id in zip(sampling, token_ids, strict=True):
            if sequence.slot != NO_SLOT:  # else it was cancelled while the batch ran
                self._take(sequence, token_id)

    def _take(self, sequence: Sequence, token_id: int) -> None:
        reason = sequence.append(token_id)
        if reason is None:
            self._events.append(TokenEvent(sequence.stream_id, [token_id]))
        else:
            self._finish(sequence, reason, [token_id])

    # -- endings

    def _finish(self, sequence: Sequence, reason: FinishReason, token_ids: list[int]) -> None:
        self._release(sequence)
        self._events.append(TokenEvent(sequence.stream_id, token_ids, reason))

    def _fail(self, plan: StepPlan[Sequence]) -> None:
        """A step that failed takes its own sequences along and no others."""
        error = SluiceError(ErrorCode.INTERNAL, "the engine failed while it worked on this request")
        of_step = {*plan.decode, *plan.admitted, *(chunk.sequence for chunk in plan.prefill)}
        for sequence in of_step:
            if sequence.stream_id in self._running or sequence.stream_id in self._waiting:
                self._release(sequence)
                self._failures.append(failed(sequence.stream_id, error))

    def _release(self, sequence: Sequence) -> None:
        """Take the sequence out of the engine; its blocks are free for the next step."""
        self._waiting.pop(sequence.stream_id, None)
        if self._running.pop(sequence.stream_id, None) is not None:
            self._pool.release(self._tables.close(sequence.slot))
            sequence.slot = NO_SLOT

    def _flush(self) -> None:
        """Send what happened; with nothing to tell, a heartbeat now and then."""
        now = perf_counter()
        if self._events or self._failures or now - self._last_emit >= HEARTBEAT_S:
            self._emit(StepFrame(self._events, self._failures, self.stats()))
            self._events, self._failures = [], []
            self._last_emit = now

    def _seconds_per_token(self) -> float:
        seconds = self._runner_seconds + self._overhead_seconds
        return seconds / max(self._prompt_tokens + self._generation_tokens, 1)


def engine_info(runner: Runner, config: EngineConfig, load_seconds: float = 0.0) -> EngineInfo:
    """What clients need to know of the engine that serves `runner`."""
    return EngineInfo(
        **asdict(runner.info),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        load_seconds=load_seconds,
    )
