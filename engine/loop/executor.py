"""The in-flight batching loop: drain, plan, apply, run, commit, emit. One thread owns the queue, the sequences, the
block tables and the free list. Other threads send commands."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter

import msgspec

from sluice.engine.blocks import blocks_for
from sluice.engine.config import EngineConfig
from sluice.engine.frames import (
    AskView,
    Cancel,
    Command,
    EngineView,
    FetchBlocks,
    LoadAdapter,
    Profile,
    Shutdown,
    StepFrame,
    Submit,
    UnloadAdapter,
    request_failed,
)
from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.kv_tiers.peers import BlockExchange
from sluice.engine.kv_tiers.returns import PrefixReturns, copy_seconds
from sluice.engine.kv_tiers.tiers import KvTiers, make_tiers
from sluice.engine.loop.adapters import AdapterTable
from sluice.engine.loop.handover import make_handover
from sluice.engine.loop.load import engine_info, make_drafter
from sluice.engine.loop.lookahead import Lookahead, make_lookahead
from sluice.engine.loop.recorder import StepRecorder, draw_block_map
from sluice.engine.loop.sequences import Intake, RunningSequences
from sluice.engine.loop.step import BuiltBatch, build_batch, commit_tokens, observe_drafts, record_prompt
from sluice.engine.runners.base import Logits, Runner
from sluice.engine.scheduling.admission import HEARTBEAT_S, MAX_COMMANDS
from sluice.engine.scheduling.planner import StepLimits, StepPlan, find_policy, plan_step
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.drafter import TokenPrices
from sluice.engine.statistics import EngineStats
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

POLL_S = 0.002
"""Wait for commands of a loop that has nothing to run while a grammar is compiled or an adapter is read."""

ReceiveCommands = Callable[[float], list[Command]]
"""Returns all commands that wait; without any, waits up to so many seconds for the first."""


class InflightExecutor:
    """Serves one runner. `step()` is one iteration of the loop, and `run()` returns after a Shutdown command."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        receive: ReceiveCommands,
        emit: Callable[[StepFrame], None],
        clock: Callable[[], float] = perf_counter,
        draft_runner: Runner | None = None,
        exchange: BlockExchange | None = None,
    ) -> None:
        """`exchange` carries blocks between this engine and others. Raises SluiceError for an adapter or KV tiers of
        `config` that the runner does not take."""
        self._adapters = AdapterTable(runner)
        for name, path in config.lora_modules.items():
            self._adapters.load(name, path)
        self.info = msgspec.structs.replace(engine_info(runner, config), **self._adapters.facts())
        self._runner = runner
        self._config = config
        self._receive = receive
        self._emit = emit
        self._clock = clock
        self._policy = find_policy(config.scheduler_policy)
        self._handover = make_handover(runner, config, exchange, clock)
        tiers = make_tiers(runner, config, None if self._handover is None else self._handover.peers)
        is_caching, has_tiers = config.enable_prefix_caching, tiers is not None
        self.kv = KvCacheManager(self.info, is_prefix_caching=is_caching, has_tiers=has_tiers, clock=clock)
        self._recorder = StepRecorder(clock)
        drafter = make_drafter(config, self.kv, draft_runner)
        self._intake = Intake(self.info, config, clock)
        self._sequences = RunningSequences(self._intake, self.kv, self._recorder, clock, drafter)
        self._running = self._sequences.running
        self._ahead = make_lookahead(runner, self._sequences, self._intake, self._recorder, clock)
        self._returns = None if tiers is None else self._make_returns(tiers)
        if self._handover is not None:
            self._handover.offer(self.kv.pool)
            self.info = msgspec.structs.replace(self.info, block_identity=self._handover.identity)
        self._inbox: deque[Command] = deque()
        self._is_shut_down = False
        self._is_stalled = False
        """Whether the last step had nothing to run."""
        self._last_emit = 0.0
        self._ended = 0.0
        """When the last step ended."""

    def _make_returns(self, tiers: KvTiers) -> PrefixReturns:
        return PrefixReturns(tiers, self.kv, self._policy, self.info, self._intake.forecast.pace, self._clock)

    def run(self) -> None:
        """Run steps until a Shutdown command. An exception outside of a batch ends the engine."""
        try:
            while not self._is_shut_down:
                self.step()
            self._finish_ahead()
        finally:
            if self._returns is not None:
                self._returns.close()
            if self._handover is not None:
                self._handover.close()
            self._intake.close()
            self._adapters.close()

    def step(self) -> None:
        """Wait for work if there is none, then run one batch and emit its events."""
        idle_wait_s = self._idle_wait_s()
        commands = self._drain(idle_wait_s)
        started = self._clock()
        self._recorder.begin(started)
        self._handle(commands)
        self._sequences.expire(started)
        self._enqueue_compiled()
        self._recorder.mark("intake")
        if self._adapters.is_changing:
            self._change_adapters()
        if self._handover is not None and self._handover.is_sending:
            self._handover.send(copy_seconds(self._running.values()))
        plan, is_under_way = self._plan(), self._is_under_way
        ahead = self._ahead if self._ahead is not None and self._ahead.takes(plan) else None
        if is_under_way and ahead is None:
            self._finish_ahead()
            plan = self._plan()
        self._recorder.mark("plan")
        self._intake.note_admitted(candidate.sequence for candidate in plan.admitted)
        if ahead is not None:
            self._run_ahead(ahead, plan, started)
        elif not plan.is_empty:
            self._run_plan(plan)
        self._is_stalled = plan.is_empty and not is_under_way
        self._emit_frame()
        if ahead is None and not plan.is_empty:
            self._recorder.mark("emit")
            step = self._recorder.end(plan, len(self._running), len(self._intake))
            # The time since the last step is part of a wait too, unless the engine had nothing to do.
            began = started if idle_wait_s else self._ended
            self._intake.observe_step(step, self._clock() - began)
        self._ended = self._clock()

    def stats(self) -> EngineStats:
        pool = self.kv.pool
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._intake),
            num_blocks_used=pool.num_used,
            num_blocks_free=pool.num_free,
            num_blocks_reserved=self._sequences.num_reserved_blocks,
            num_blocks_cached=pool.num_cached,
            kv_tiers=None if self._returns is None else self._returns.tiers.stats(),
            handover=None if self._handover is None else self._handover.stats(),
            histograms=self._recorder.histograms(),
            **self._intake.stats(len(self._running)),
            **self._recorder.counters.totals(),  # type: ignore[arg-type]
        )

    def view(self, question: AskView) -> EngineView:
        """Answer who watches. To be called between steps, or while the engine handles commands."""
        drawn = draw_block_map(self.kv, self._running.values(), self._sequences.num_reserved_blocks)
        return msgspec.structs.replace(self._recorder.view(question), block_map=drawn)

    def check_invariants(self) -> None:
        """Assert that blocks, sequences and counters are consistent. For tests, and cheap enough for an idle engine."""
        running = self._running.values()
        self.kv.check(running)
        assert len(running) <= self._config.max_num_seqs
        if self._policy.reserves_worst_case:
            assert self.stats().num_blocks_reserved <= self.info.num_blocks, "over-committed"
            counters = self._recorder.counters
            assert counters.preemptions == counters.recomputed_tokens == 0

    # -- commands

    def _drain(self, timeout_s: float) -> list[Command]:
        """Return the next commands in order. The rest of a burst waits, so that it does not delay running streams."""
        inbox = self._inbox
        inbox.extend(self._receive(0.0 if inbox else timeout_s))
        return [inbox.popleft() for _ in range(min(len(inbox), MAX_COMMANDS))]

    def _idle_wait_s(self) -> float:
        """Return how long to wait for commands."""
        is_sending = self._handover is not None and self._handover.is_sending
        if self._running or self._is_under_way or is_sending or (self._intake.queue and not self._is_stalled):
            return 0.0
        return POLL_S if self._intake or self._adapters.is_changing else HEARTBEAT_S

    def _handle(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self._submit(command)
                case Cancel():
                    self._sequences.cancel(command.stream_id)
                case LoadAdapter() | UnloadAdapter():
                    self._adapters.begin(command)
                case FetchBlocks() if self._handover is not None:
                    self._handover.answer(command)
                case Profile(seconds):
                    self._recorder.profile(seconds)
                case Shutdown():
                    self._is_shut_down = True
                    for sequence in [*self._running.values(), *self._intake]:
                        self._sequences.cancel(sequence.stream_id)

    def _submit(self, command: Submit) -> None:
        name = command.request.adapter
        adapter = self._adapters.number_and_digest(name) if name else (0, "")
        try:
            running, free_blocks = self._running.values(), self._count_free_blocks()
            self._intake.submit(command, running, free_blocks, self._clock(), self._count_started, adapter)
        except SluiceError as error:
            self._sequences.failures.append(request_failed(command.stream_id, error))
            return
        sequence = self._intake.get(command.stream_id)
        if command.source is not None and self._handover is not None and sequence is not None:
            self._handover.trace(sequence, command.source)
            self._returns = self._returns or self._make_returns(self._handover.make_transit())

    def _change_adapters(self) -> None:
        """Put adapters into use that were read meanwhile."""
        if self._adapters.is_ready:
            self._finish_ahead()
        self._adapters.finish_changes(lambda: (*self._running.values(), *self._intake))
        if self._adapters.outcomes:
            self.info = msgspec.structs.replace(self.info, **self._adapters.facts())
            self._intake.use(self.info)

    def _enqueue_compiled(self) -> None:
        if self._intake.is_compiling:
            for sequence, error in self._intake.enqueue_compiled():
                self._sequences.fail(sequence, error)

    # -- one step

    def _plan(self) -> StepPlan[Sequence]:
        running = list(self._running.values())
        if self._sequences.drafter is not None:
            self._draft(running)
        max_seqs, max_tokens = self._config.max_num_seqs, self._config.max_num_batched_tokens
        beside, alone = self._intake.forecast.pace.max_prefill_tokens()
        if self._returns is not None:
            self._returns.bring_back(self._intake.queue, running)
        num_free, may_have_drafts = self.kv.pool.num_free, self._sequences.drafter is not None
        limits = StepLimits(max_seqs, max_tokens, num_free, beside, alone, may_have_drafts)
        waiting = self.kv.candidates(self._intake.queue, running)
        return plan_step(running, waiting, limits, self._policy, self.kv.num_private_blocks)

    def _count_started(self, waiting: Iterable[Sequence]) -> int:
        """Return how many of `waiting` the next step would take. One that waits a few steps to share a prefix counts,
        with all its blocks, unless the whole batch goes before it."""
        running = list(self._running.values())
        limits = StepLimits(self._config.max_num_seqs, self._config.max_num_batched_tokens, self.kv.pool.num_free)
        candidates = self.kv.candidates(waiting, running)
        if self._policy.is_in_flight:
            candidates = (replace(each, is_delayed=False) for each in candidates)
        return len(self._policy.decide(running, candidates, limits, self.kv.num_private_blocks).admitted)

    def _draft(self, running: list[Sequence]) -> None:
        """Propose drafts for decoding sequences, unless the blocks for them could force a preemption."""
        assert self._sequences.drafter is not None
        decoding = [sequence for sequence in running if sequence.num_tokens_left == 1]
        max_blocks = blocks_for(self._config.num_speculative_tokens, self.info.block_size) + 1
        has_blocks = self._policy.reserves_worst_case or self.kv.pool.num_free >= max_blocks * len(running)
        if not decoding or not has_blocks:
            return
        try:
            self._sequences.drafter.propose(decoding, TokenPrices(*self._intake.forecast.token_prices(len(running))))
        except Exception:
            log.exception("drafting failed; there is no speculation from here on")
            self._sequences.drafter = None
            for sequence in decoding:
                sequence.drafts = []

    def _run_plan(self, plan: StepPlan[Sequence]) -> None:
        try:
            self._apply(plan)
            built = build_batch(plan, self.kv.tables)
            for sequence in built.sampling:
                if sequence.sampling.constraint is not None:
                    sequence.sampling.constraint.prepare()
            self._recorder.mark("build")
            logits = self._run_batch(built)
            self._recorder.mark("run")
            self._handle(self._drain(0.0))
            self._commit(plan, built, logits)
            self._recorder.mark("commit")
        except Exception:
            self._sequences.fail_step(plan)

    def _apply(self, plan: StepPlan[Sequence]) -> None:
        for sequence in plan.preempted:
            self._sequences.preempt(sequence)
        for candidate in plan.admitted:
            self.kv.start(candidate)
            self._sequences.start(candidate.sequence)
        self.kv.allocate_next(plan.decode)
        for sequence, num_drafts in zip(plan.decode, plan.num_drafts, strict=False):
            self.kv.allocate(sequence, sequence.num_computed + 1 + num_drafts)
        for chunk in plan.prefill:
            self.kv.allocate(chunk.sequence, chunk.sequence.num_computed + chunk.num_tokens)
        if self._returns is not None:
            num_prefill = sum(chunk.num_tokens for chunk in plan.prefill)
            self._returns.keep_reclaimed(num_prefill, is_decoding=bool(plan.decode))

    def _run_batch(self, built: BuiltBatch) -> Logits:
        began = self._clock()
        logits = self._runner.run(built.step)
        self._recorder.record_run(began, self._clock())
        return logits

    def _commit(self, plan: StepPlan[Sequence], built: BuiltBatch, logits: Logits) -> None:
        self._sequences.advance(plan)
        self._sequences.note_computed(plan)
        if built.prompt_rows:
            record_prompt(built, logits)
        outcomes, failures = commit_tokens(built, logits, plan.num_drafts)
        self._recorder.mark("sample")
        if plan.num_drafts:
            assert self._sequences.drafter is not None
            observe_drafts(plan, self._sequences.drafter, self._recorder.counters)
        if self._sequences.drafter is not None and plan.decode:
            num_tokens = sum(len(sequence.fresh_token_ids) for sequence in plan.decode)
            self._intake.forecast.observe_tokens(len(plan.decode), num_tokens)
        self._sequences.end_step(plan, outcomes, failures)

    @property
    def _is_under_way(self) -> bool:
        """Whether a step was launched whose tokens are not known yet."""
        return self._ahead is not None and self._ahead.under_way is not None

    def _finish_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.finish()

    def _run_ahead(self, ahead: Lookahead, plan: StepPlan[Sequence], began: float) -> None:
        """Launch the step, then commit the one before it: the device works meanwhile."""
        launched = None
        try:
            if not plan.is_empty:
                self._apply(plan)
                launched = ahead.launch(plan, build_batch(plan, self.kv.tables), began)
            self._recorder.mark("launch")
        except Exception:
            ahead.finish()
            self._sequences.fail_step(plan)
        else:
            ahead.finish()
            ahead.follow(launched)

    def _emit_frame(self) -> None:
        """Emit the events and failures of this step; without any, a heartbeat when one is due."""
        now = self._clock()
        sequences = self._sequences
        has_content = bool(sequences.events or sequences.failures or self._adapters.outcomes)
        if has_content or now - self._last_emit >= HEARTBEAT_S:
            if not has_content and not self._running:
                self.check_invariants()
            self._intake.update_prediction(self._running.values(), self._count_free_blocks, now)
            frame = StepFrame(*sequences.take_frame(), self.stats(), self._adapters.outcomes)
            if (profile := self._recorder.take_profile()) is not None:
                frame = msgspec.structs.replace(frame, profile=profile)
            self._emit(frame)
            self._adapters.outcomes = []
            self._last_emit = now

    def _count_free_blocks(self) -> int:
        """Return how many blocks no running sequence reserves."""
        return self.info.num_blocks - self._sequences.num_reserved_blocks
