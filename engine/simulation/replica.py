"""One simulated replica: plans its steps as the engine's loop does, and lets their time pass."""

import math
from array import array
from collections.abc import Callable

from sluice.engine.blocks import BlockHash, worst_case_blocks
from sluice.engine.fleet.router import ReplicaView
from sluice.engine.forecast.learning import PrefillPace
from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.scheduling.planner import ChunkLimits, Policy, StepLimits, StepPlan, plan_step
from sluice.engine.scheduling.queue import WaitingQueue
from sluice.engine.sequence import Sequence
from sluice.engine.simulation.profile import ReplicaProfile
from sluice.engine.simulation.traces import TracedRequest
from sluice.engine.types import EngineInfo, GenerateRequest, SamplingParams

PACE_STEPS = 64
"""Equal steps after which one more teaches the pace nothing."""
_UNTOLD = [0]
"""The tokens of a prompt of which only the number is known: lists of a long queue would fill the memory."""


class TracedSequence(Sequence):
    """The engine's sequence for a request of a trace, without tokens. It notes when it would have got them, in
    simulated seconds."""

    __slots__ = ("_hashes", "admitted_at", "first_token_at", "gap_counts", "gaps", "last_token_at", "length")

    def __init__(
        self, number: int, request: TracedRequest, hashes: list[BlockHash], info: EngineInfo, now: float
    ) -> None:
        """`hashes` are those of the prompt's full blocks."""
        asked = GenerateRequest(
            request_id="",
            prompt_token_ids=_UNTOLD,
            sampling=SamplingParams(max_tokens=request.max_tokens or request.num_output),
            priority=request.priority,
            tenant=request.tenant,
        )
        super().__init__(number, asked, info, now)
        self.num_prompt = self.num_tokens = request.num_prompt
        self.worst_case_blocks = worst_case_blocks(request.num_prompt, self.max_tokens, info.block_size)
        self._hashes = hashes
        self.length = request.num_output
        """Output tokens after which it ends."""
        self.admitted_at = self.first_token_at = self.last_token_at = math.nan
        self.gaps = array("d")
        """Seconds between its tokens, each as often as `gap_counts` says."""
        self.gap_counts = array("q")

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` blocks. Blocks with output are like no other's."""
        hashes = self._hashes
        while len(hashes) < num_blocks:
            content = b"out" + self.stream_id.to_bytes(8, "little") + len(hashes).to_bytes(5, "little")
            hashes.append(BlockHash(content))
        return hashes[:num_blocks]

    def take_tokens(self, count: int, at: float, step_s: float) -> None:
        """Take `count` tokens, of which the last comes at `at` and each but the first `step_s` after the one before."""
        if self.num_output == 0:
            self.first_token_at = at - (count - 1) * step_s
        else:
            self.gaps.append(at - (count - 1) * step_s - self.last_token_at)
            self.gap_counts.append(1)
        if count > 1:
            self.gaps.append(step_s)
            self.gap_counts.append(count - 1)
        self.last_token_at = at
        self.num_tokens += count
        self.num_output += count


class SimulatedReplica:
    """A replica in simulated time. Its owner calls `finish_step` when the clock comes to `ends_at`.

    Steps that only decode the same sequences are taken together, up to the next end of a sequence or the next request.
    """

    def __init__(
        self,
        number: int,
        profile: ReplicaProfile,
        policy: Policy,
        on_first_token: Callable[[int], None],
        on_end: Callable[["SimulatedReplica", TracedSequence], None],
    ) -> None:
        """`on_first_token` is told the stream id of each sequence that has its first token, `on_end` of each that has
        all its tokens."""
        self.number = number
        self.profile = profile
        self.ends_at = math.inf
        """When its step ends; infinite where nothing runs."""
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_computed_tokens = 0
        """Tokens of prompts that it computed."""
        self.num_prefilling_tokens = 0
        """Tokens of prompts to compute before all its sequences have a first token."""
        self._num_others = 0
        """Other replicas that are in a step and take some of the same cores."""
        self._costs = profile.costs
        self._policy = policy
        self._on_first_token = on_first_token
        self._on_end = on_end
        info = profile.engine_info()
        self._kv = KvCacheManager(info, is_prefix_caching=True)
        self._kv.pool.follow(True)
        self._queue: WaitingQueue[TracedSequence] = WaitingQueue({})
        self._pace = PrefillPace(ChunkLimits(info.block_size, info.max_num_batched_tokens, profile.chooses_chunk))
        self._running: dict[int, TracedSequence] = {}
        self._plan: StepPlan[TracedSequence] | None = None
        self._began_at = 0.0
        self._first_s = self._growth_s = 0.0
        """Seconds of the first of the steps under way, and how much longer each is than the one before."""
        self._num_steps = 1
        """Steps under way."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def submit(self, sequence: TracedSequence, now: float) -> None:
        """Queue a sequence whose worst case fits into the blocks."""
        self._queue.add(sequence)
        self.num_prefilling_tokens += sequence.num_prompt
        if self._plan is None:
            self._begin_step(now)
        elif self._num_steps > 1:
            self._end_early(now)

    def note_others(self, num_others: int, now: float) -> None:
        """Hear how many other replicas are in a step. The step that runs keeps its speed; the next ones change it."""
        if num_others == self._num_others:
            return
        self._num_others = num_others
        if self._num_steps > 1 and self._plan is not None:
            self._end_early(now)

    def take_changes(self) -> tuple[bytes, bytes]:
        """Return the hashes of the blocks stored and removed since the last call, as an engine reports them."""
        changes = self._kv.pool.take_changes()
        assert changes is not None, "a step changes fewer blocks than the pool notes"
        stored, removed = changes
        return b"".join(stored), b"".join(removed)

    def view(self) -> ReplicaView:
        """Return what a router would see by the statistics of the last step."""
        profile, running = self.profile, self._running.values()
        num_context = sum(sequence.num_computed for sequence in running)
        return ReplicaView(
            name=str(self.number),
            number=self.number,
            num_free_blocks=self._kv.pool.num_free,
            num_reserved_blocks=self._num_reserved_blocks(),
            num_blocks=profile.num_blocks,
            block_size=profile.block_size,
            num_running=len(running),
            num_waiting=len(self._queue),
            num_tokens_waiting=self._queue.num_tokens,
            predicted_wait_s=self._predict_wait() if len(self._queue) else 0.0,
            prefill_tokens_per_s=profile.prefill_tokens_per_s,
            decode_seconds_per_step=self._costs.seconds(0, len(running) + 1, num_context, 0),
            prefilling_tokens=self.num_prefilling_tokens,
        )

    def _num_reserved_blocks(self) -> int:
        missing = sum(each.worst_case_blocks - each.num_allocated_blocks for each in self._running.values())
        return self._kv.pool.num_used + missing

    def _predict_wait(self) -> float:
        """Return how long one more request would wait: until as many sequences have ended as wait before it. Lengths
        are known here, where an engine can only forecast them."""
        running = self._running.values()
        if not running:
            return 0.0
        step_s = self._costs.seconds(0, len(running), sum(each.num_computed for each in running), 0)
        left = sorted(each.length - each.num_output for each in running)
        num_before = len(self._queue)
        whole, rest = divmod(num_before, len(left))
        return (whole * left[-1] + left[rest]) * step_s

    # -- steps

    def _begin_step(self, now: float) -> None:
        if not self._running and not len(self._queue):
            self._plan, self.ends_at = None, math.inf
            return
        running = list(self._running.values())
        beside, alone = self._pace.max_prefill_tokens()
        profile = self.profile
        limits = StepLimits(
            profile.max_num_seqs, profile.max_num_batched_tokens, self._kv.pool.num_free, beside, alone, False
        )
        waiting = self._kv.candidates(self._queue, running)
        plan = plan_step(running, waiting, limits, self._policy, self._kv.num_private_blocks)
        self._apply(plan, now)
        self._plan, self._began_at = plan, now
        slowed = 1.0 + profile.slowdown * self._num_others
        self._first_s = slowed * self._step_seconds(plan)
        self._growth_s = slowed * self._costs.context_token_s * len(plan.decode)
        self._num_steps = self._num_equal_steps(plan)
        self.ends_at = now + self._elapsed(self._num_steps)

    def _apply(self, plan: StepPlan[TracedSequence], now: float) -> None:
        for sequence in plan.preempted:
            del self._running[sequence.stream_id]
            if sequence.num_output == 0 and not sequence.was_preempted:
                self.num_prefilling_tokens -= sequence.num_prompt - sequence.num_computed
            sequence.num_discarded, sequence.was_preempted = sequence.num_computed, True
            self._kv.release(sequence)
            self._queue.requeue(sequence)
        for candidate in plan.admitted:
            self._kv.start(candidate)
            sequence = candidate.sequence
            self._queue.admit(sequence)
            self._running[sequence.stream_id] = sequence
            if not sequence.was_preempted:
                sequence.admitted_at = now
                sequence.num_cached_tokens = sequence.num_computed
                self.num_prefilling_tokens -= sequence.num_computed
        for chunk in plan.prefill:
            self._kv.allocate(chunk.sequence, chunk.sequence.num_computed + chunk.num_tokens)

    def _step_seconds(self, plan: StepPlan[TracedSequence]) -> float:
        num_prefill = attention = 0
        for chunk in plan.prefill:
            num_prefill += chunk.num_tokens
            attention += chunk.num_tokens * (chunk.sequence.num_computed + chunk.num_tokens // 2)
        num_context = sum(sequence.num_computed for sequence in plan.decode)
        return self._costs.seconds(num_prefill, len(plan.decode), num_context, attention)

    def _num_equal_steps(self, plan: StepPlan[TracedSequence]) -> int:
        """Return how many steps will have the same plan, if no request comes. What waits could not start in this one,
        and until a sequence ends nothing that it lacks becomes free."""
        if plan.prefill or plan.admitted or plan.preempted or len(plan.decode) < len(self._running):
            return 1
        if any(sequence.num_output == 0 for sequence in plan.decode):
            return 1
        count = min(sequence.length - sequence.num_output for sequence in plan.decode)
        if not self._policy.reserves_worst_case:  # blocks may run out
            spare = self._kv.pool.num_free // len(plan.decode) - 1
            count = min(count, max(spare * self.profile.block_size, 1))
        return count

    def _elapsed(self, num_steps: int) -> float:
        """Return the seconds of the first `num_steps` of the steps under way."""
        return num_steps * self._first_s + self._growth_s * num_steps * (num_steps - 1) / 2

    def _end_early(self, now: float) -> None:
        """Let the steps under way end with the one that runs at `now`, so that the next can take another request."""
        passed = now - self._began_at
        low, high = 1, self._num_steps  # the first count whose steps end at `now` or later
        while low < high:
            middle = (low + high) // 2
            if self._elapsed(middle) >= passed:
                high = middle
            else:
                low = middle + 1
        self._num_steps = low
        self.ends_at = self._began_at + self._elapsed(low)

    def finish_step(self) -> None:
        """Commit the steps under way, at `ends_at`, and begin the next one."""
        plan, count, now = self._plan, self._num_steps, self.ends_at
        assert plan is not None, "a replica without a step has no end of one"
        seconds = now - self._began_at
        self.busy_s += seconds
        self.num_steps += count
        step_s = seconds / count
        num_prefill = sum(chunk.num_tokens for chunk in plan.prefill)
        self.num_computed_tokens += num_prefill
        for _ in range(min(count, PACE_STEPS)):
            self._pace.observe(num_prefill, step_s)
        got_tokens: list[TracedSequence] = []
        for sequence in plan.decode:
            self._kv.allocate(sequence, sequence.num_computed + count)
            sequence.num_computed += count
            if sequence.num_output == 0:
                self._note_prefilled(sequence, 1)
                self.num_computed_tokens += 1
            got_tokens.append(sequence)
        for chunk in plan.prefill:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            if sequence.num_output == 0:
                self._note_prefilled(sequence, chunk.num_tokens)
            if sequence.num_computed == sequence.num_tokens:
                got_tokens.append(sequence)
        for sequence in got_tokens:
            if sequence.num_output == 0:
                self._on_first_token(sequence.stream_id)
            sequence.take_tokens(count, now, step_s)
        self._kv.index_full_blocks((*plan.decode, *(chunk.sequence for chunk in plan.prefill)))
        for sequence in got_tokens:
            if sequence.num_output >= sequence.length:
                self._end(sequence)
        self._begin_step(now)

    def _note_prefilled(self, sequence: TracedSequence, num_tokens: int) -> None:
        if not sequence.was_preempted:
            self.num_prefilling_tokens -= num_tokens

    def _end(self, sequence: TracedSequence) -> None:
        del self._running[sequence.stream_id]
        self._queue.charge(sequence, sequence.num_output)
        self._queue.remove(sequence.stream_id)
        self._kv.release(sequence)
        self._on_end(self, sequence)

    def check(self) -> None:
        """Assert that blocks and counters are consistent."""
        self._kv.check(list(self._running.values()))
        if not self._running and not len(self._queue):
            assert self.num_prefilling_tokens == 0, f"{self.num_prefilling_tokens} tokens left to compute"
