"""What is known of the work done: counters, the last iteration, how long steps take. Statistics where TensorRT-LLM has
them, else what its answers show."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from engine.delegated.tensorrt_llm.loop.kv_events import CachedBlocks
from engine.delegated.tensorrt_llm.loop.pace import Pace
from engine.delegated.tensorrt_llm.loop.sequence import LlmSequence
from engine.delegated.tensorrt_llm.loop.statistics import StepTimes, drafts_of, iteration_stats
from engine.forecast.wait import WaitForecast
from engine.loop.executor import Counters
from engine.types import EngineInfo, IterationStats

SILENCE_S = 5.0
"""Without statistics for so long while something runs, there are none."""


class Books:
    """Written by the executor, on its loop. `iteration`: one that TensorRT-LLM told of before."""

    def __init__(self, info: EngineInfo, forecast: WaitForecast, iteration: IterationStats | None, now: float) -> None:
        self.counters = Counters()
        self.iteration = iteration
        self._told_at = -math.inf if iteration is None else now
        self.cached_blocks = CachedBlocks()
        self._info = info
        self._forecast = forecast
        self._times = StepTimes()
        self._pace = Pace()

    # -- from answers

    def take_tokens(self, sequence: LlmSequence, num_tokens: int, now: float) -> None:
        """It brought so many; `sequence` does not count them yet."""
        num_run = num_tokens
        if sequence.num_tokens_left > 1:
            num_run = sequence.num_tokens
        self.counters.generation_tokens += num_tokens
        step = self._pace.observe(sequence.stream_id, num_run, now)
        if step is not None and not self.has_iterations(now):
            self._observe_step(step.num_tokens, step.num_seqs, step.seconds)

    def take_prompt(self, sequence: LlmSequence, num_cached: int) -> None:
        """So many tokens of its prompt needed no computing. Versions tell it early, at the end, or never."""
        sequence.is_prompt_counted = True
        self.counters.cached_tokens += num_cached
        self.counters.prompt_tokens += sequence.num_prompt - num_cached

    def begin(self, now: float) -> None:
        """TensorRT-LLM has something to do again."""
        if self._told_at != -math.inf:
            self._told_at = now

    def rest(self) -> None:
        """Nothing is in TensorRT-LLM any more."""
        self._pace.rest()

    # -- from statistics

    def has_iterations(self, now: float) -> bool:
        """Whether it tells of them."""
        return now - self._told_at < SILENCE_S

    def take_iteration(self, told: Mapping[str, Any], now: float) -> None:
        stats = iteration_stats(told)
        self.iteration, self._told_at = stats, now
        drafted, accepted = drafts_of(told)
        self.counters.draft_tokens += drafted
        self.counters.accepted_tokens += accepted
        self.counters.preemptions += stats.num_paused or 0
        num_decoding = stats.num_generation or 0
        num_seqs = (stats.num_context or 0) + num_decoding
        if num_seqs:
            self._observe_step((stats.context_tokens or 0) + num_decoding, num_seqs, self._times.seconds(stats))

    def _observe_step(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        self.counters.steps += 1
        self.counters.runner_seconds += seconds
        self._forecast.observe_step(num_tokens, seconds)

    def blocks_used(self, inside: Collection[LlmSequence]) -> int:
        """As the last iteration says; what is inside now may hold, where there are none."""
        if not inside:  # the last iteration was over before its sequences had given theirs back
            return 0
        told = self.iteration.used_blocks if self.iteration is not None else None
        used = sum(each.num_allocated_blocks for each in inside) if told is None else told
        return min(used, self._info.num_blocks)
