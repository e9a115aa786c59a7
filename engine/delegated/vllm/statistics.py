"""vLLM's statistics of its steps under our names."""

import asyncio
from typing import Any

from sluice.engine.delegated.interface import Iteration, TakeIteration
from sluice.engine.delegated.kv_events import PublishedEvents
from sluice.engine.statistics import IterationStats


class StatisticsReader:
    """Receives the statistics of each step in the event loop, and hands them to who takes them."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Blocks that requests can use."""
        self._on_iteration: TakeIteration | None = None

    def logger_class(self, base: type) -> type:
        """Return the class of vLLM's statistics logger, whose objects tell this reader. `base` is that of the logger
        that writes Prometheus metrics: vLLM adds none where one is given, and nobody would read what it counts."""
        reader = self

        class StepLogger(base):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
                pass

            def log_engine_initialized(self) -> None:
                pass

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                pass

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                reader.take(scheduler_stats, iteration_stats)

        return StepLogger

    def take(self, scheduler: Any, iteration: Any) -> None:
        details = getattr(scheduler, "iteration_details", None)
        if self._on_iteration is not None and details is not None and not details.is_dummy:
            self._on_iteration(read_iteration(scheduler, iteration, details, self.num_blocks))

    async def follow(self, take: TakeIteration) -> None:
        """Give `take` the statistics until cancelled."""
        self._on_iteration = take
        try:
            await asyncio.Event().wait()
        finally:
            self._on_iteration = None


def published_events(vllm_config: Any) -> PublishedEvents | None:
    """Return where vLLM publishes the events of its prefix cache; None where it does not, or several ranks have a cache
    each, or where it connects to who reads."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return None
    is_bound = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith("ipc://")
    is_one = vllm_config.parallel_config.data_parallel_size == 1 and vllm_config.cache_config.enable_prefix_caching
    return PublishedEvents(config.endpoint, config.replay_endpoint, config.topic) if is_bound and is_one else None


def read_iteration(scheduler: Any, iteration: Any, details: Any, num_blocks: int) -> Iteration:
    """Return a step of vLLM's SchedulerStats, IterationStats and SchedulerIterationDetails."""
    used = round(scheduler.kv_cache_usage * num_blocks)
    drafts = getattr(scheduler, "spec_decoding_stats", None)
    stats = IterationStats(
        iteration=details.iteration_index,
        latency_ms=details.elapsed_ms,
        num_active=scheduler.num_running_reqs + scheduler.num_waiting_reqs,
        num_scheduled=details.num_ctx_requests + details.num_generation_requests,
        num_context=details.num_ctx_requests,
        num_generation=details.num_generation_requests,
        num_paused=getattr(iteration, "num_preempted_reqs", 0),
        num_queued=scheduler.num_waiting_reqs,
        context_tokens=details.num_ctx_tokens,
        max_blocks=num_blocks,
        free_blocks=num_blocks - used,
        used_blocks=used,
    )
    return Iteration(
        stats,
        details.elapsed_ms / 1e3,
        num_drafted=int(getattr(drafts, "num_draft_tokens", 0)),
        num_accepted=int(getattr(drafts, "num_accepted_tokens", 0)),
    )
