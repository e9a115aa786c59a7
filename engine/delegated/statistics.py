"""Statistics of the work done: counters, the last iteration, how long steps take. They come from the runtime's own
statistics where there are any, else from the tokens of its responses."""

import math
from collections.abc import Collection

from sluice.engine.delegated.interface import Iteration
from sluice.engine.delegated.sequence import DelegatedSequence
from sluice.engine.forecast.wait import WaitForecast
from sluice.engine.frames import ProfiledStep, StepProfile
from sluice.engine.loop.recorder import Step, WorkRecorder
from sluice.engine.statistics import EngineStats, IterationStats
from sluice.engine.types import EngineInfo

SILENCE_S = 5.0
"""Without statistics for so long while something runs, there are none."""


class StatisticsRecorder(WorkRecorder):
    """Records the work done and teaches the forecast how long steps take. Written by the executor, on its loop."""

    def __init__(self, info: EngineInfo, forecast: WaitForecast, iteration: IterationStats | None, now: float) -> None:
        """`iteration` is one that ran before."""
        super().__init__()
        self.iteration = iteration
        self._profiled = -1
        """The last iteration that `profile` has told of."""
        self._last_iteration_at = -math.inf if iteration is None else now
        self._num_blocks = info.num_blocks
        self._forecast = forecast
        self._estimator = StepEstimator()

    # -- from responses

    def record_output(self, sequence: DelegatedSequence, num_tokens: int, now: float) -> None:
        """Count tokens that a response brought; `sequence` does not count them yet."""
        num_prefill = sequence.num_tokens if sequence.num_tokens_left > 1 else 0
        self.counters.generation_tokens += num_tokens
        if sequence.num_output == 0:
            self.record_prefill(now - sequence.submitted_at - sequence.queue_s)
        step = self._estimator.observe(sequence.stream_id, num_prefill, now)
        if step is not None and not self.has_iterations(now):
            num_seqs, num_prefill, seconds = step
            self._take_step(num_seqs, num_prefill, num_seqs, seconds)

    def record_prompt(self, sequence: DelegatedSequence, num_cached: int) -> None:
        """Count a prompt of which `num_cached` tokens needed no computing. Runtimes tell it early, late or never."""
        sequence.is_prompt_counted = True
        self.counters.cached_tokens += num_cached
        self._forecast.observe_prompt(sequence.num_prompt, num_cached)
        self.counters.prompt_tokens += sequence.num_prompt - num_cached
        self.record_tokens(sequence.tenant, sequence.num_prompt - num_cached, 0)

    def on_busy(self, now: float) -> None:
        """The runtime has something to do again."""
        if self._last_iteration_at != -math.inf:
            self._last_iteration_at = now

    def on_idle(self) -> None:
        """The runtime has no requests any more."""
        self._estimator.reset()

    # -- from the runtime's statistics

    def has_iterations(self, now: float) -> bool:
        """Return whether the runtime tells of its iterations."""
        return now - self._last_iteration_at < SILENCE_S

    def profile(self, stats: EngineStats, now: float) -> StepProfile | None:
        """Return the runtime's last iteration, where it is a new one."""
        last = stats.iteration
        if last is None or last.iteration == self._profiled:
            return None
        self._profiled, seconds = last.iteration, last.latency_ms / 1000
        counts = {"num_running": stats.num_running, "num_waiting": stats.num_waiting}
        return StepProfile(now, [ProfiledStep(now - seconds, [("iteration", seconds)], **counts)])

    def record_iteration(self, iteration: Iteration, now: float) -> None:
        stats = iteration.stats
        self.iteration, self._last_iteration_at = stats, now
        self.counters.draft_tokens += iteration.num_drafted
        self.counters.accepted_tokens += iteration.num_accepted
        self.counters.preemptions += stats.num_paused or 0
        num_decoding = stats.num_generation or 0
        num_seqs = (stats.num_context or 0) + num_decoding
        if num_seqs:
            self._take_step(num_seqs, stats.context_tokens or 0, num_decoding, iteration.seconds)

    def _take_step(self, num_seqs: int, num_prefill: int, num_decode: int, seconds: float) -> None:
        self.counters.steps += 1
        self.counters.runner_seconds += seconds
        self.record_step(Step(num_seqs, num_decode, num_prefill, num_prefill + num_decode, seconds, seconds))
        self._forecast.observe_step(num_seqs, num_prefill, seconds)

    def blocks_used(self, in_flight: Collection[DelegatedSequence]) -> int:
        """Return the blocks in use by the last iteration, else an estimate from the requests in flight."""
        if not in_flight:  # the last iteration was over before its sequences had released theirs
            return 0
        used = self.iteration.used_blocks if self.iteration is not None else None
        if used is None:
            used = sum(each.num_allocated_blocks for each in in_flight)
        return min(used, self._num_blocks)


class StepEstimator:
    """Estimates steps from tokens: what comes until a sequence has its second token counts as one step."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._members: set[int] = set()
        self._num_prefill = 0

    def observe(self, stream_id: int, num_prefill: int, now: float) -> tuple[int, int, float] | None:
        """Take a sequence's response, for which `num_prefill` tokens of a prompt ran. Returns the sequences, the prompt
        tokens and the seconds of a step that is complete now."""
        step = None
        if stream_id in self._members:
            if self._began is not None:
                step = (len(self._members), self._num_prefill, now - self._began)
            self._began = now
            self._members.clear()
            self._num_prefill = 0
        self._members.add(stream_id)
        self._num_prefill += num_prefill
        return step

    def reset(self) -> None:
        """Nothing runs any more: the time until something does belongs to no step."""
        self._began = None
        self._members.clear()
        self._num_prefill = 0
