"""The families of Triton's TensorRT-LLM backend, for every language model, whatever runs it.

Where TensorRT-LLM runs a model they are its own numbers of its last iteration. For our own executor, and for numbers
that TensorRT-LLM does not report, they are derived from the engine's last frame and from its clients' open requests.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sluice.engine.scheduling.planner import find_policy
from sluice.engine.statistics import IterationStats
from sluice.gateway.telemetry.families import GAUGE, Labels, add_histogram, build_family, empty_family, model_series
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import Model

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from sluice.pipelines.llm.text import LlmText
    from sluice.record.histogram import Histogram

_US_PER_S = 1_000_000
_BATCH_FIELDS = {"num_active", "num_scheduled", "num_context", "num_generation", "num_paused", "context_tokens"}
"""Fields that are stale once nothing runs: TensorRT-LLM's last iteration includes the requests that ended in it."""

Read = Callable[[IterationStats], float | None]


class _Gauge(NamedTuple):
    """A family whose values have one more label than model and version."""

    name: str
    text: str
    label: str
    values: dict[str, Read]


def _waiting(iteration: IterationStats) -> int | None:
    if iteration.num_active is None or iteration.num_scheduled is None:
        return None
    return max(iteration.num_active - iteration.num_scheduled, 0)


def _fraction(iteration: IterationStats) -> float | None:
    return iteration.used_blocks / iteration.max_blocks if iteration.max_blocks and iteration.used_blocks else 0.0


_GAUGES = (
    _Gauge(
        "nv_trt_llm_request_metrics",
        "Requests in the engine, by what becomes of them in its last iteration",
        "request_type",
        {
            "active": lambda i: i.num_active,
            "max": lambda i: i.max_active,
            "scheduled": lambda i: i.num_scheduled,
            "context": lambda i: i.num_context,
            "waiting": _waiting,
        },
    ),
    _Gauge(
        "nv_trt_llm_runtime_memory_metrics",
        "Memory that TensorRT-LLM uses, in bytes",
        "memory_type",
        {
            "cpu": lambda i: i.cpu_memory_bytes,
            "gpu": lambda i: i.gpu_memory_bytes,
            "pinned": lambda i: i.pinned_memory_bytes,
        },
    ),
    _Gauge(
        "nv_trt_llm_kv_cache_block_metrics",
        "Blocks of the KV cache",
        "kv_cache_block_type",
        {
            "max": lambda i: i.max_blocks,
            "free": lambda i: i.free_blocks,
            "used": lambda i: i.used_blocks,
            "tokens_per": lambda i: i.tokens_per_block,
            "reused": lambda i: i.reused_blocks,
            "fraction": _fraction,
        },
    ),
    _Gauge(
        "nv_trt_llm_inflight_batcher_metrics",
        "What the last iteration's batch was made of",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": lambda i: i.context_tokens,
            "generation_requests": lambda i: i.num_generation,
            "micro_batch_id": lambda i: i.micro_batch_id,
            "paused_requests": lambda i: i.num_paused,
        },
    ),
    _Gauge(
        "nv_trt_llm_general_metrics",
        "The last iteration's number, and its time in microseconds since 1970",
        "general_type",
        {"timestamp": lambda i: i.timestamp_us, "iteration_counter": lambda i: i.iteration},
    ),
)
_OUTPUT_LENGTHS, _INPUT_LENGTHS = "nv_llm_output_token_len", "nv_llm_input_token_len"
TRT_LLM_NAMES = frozenset({*(gauge.name for gauge in _GAUGES), _OUTPUT_LENGTHS, _INPUT_LENGTHS})
TRT_LLM_SAMPLE_NAMES = frozenset(
    f"{name}_{end}" for name in (_OUTPUT_LENGTHS, _INPUT_LENGTHS) for end in ("bucket", "count", "sum")
)


class TrtLlmCollector(Collector):
    """Collects the families of the language models that are loaded at the scrape, on the event loop's thread."""

    def __init__(self, models: Callable[[], Iterable[Model]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        texts = [(model_series(model).labels, model.text) for model in self._models() if isinstance(model, LlmModel)]
        iterations = [(labels, last_iteration(text)) for labels, text in texts]
        for gauge in _GAUGES:
            yield build_family(gauge.name, gauge.text, GAUGE, _values(gauge, iterations))
        activities = [(labels, text.activity) for labels, text in texts]
        outputs = [(labels, activity.output_lengths) for labels, activity in activities]
        yield _lengths(_OUTPUT_LENGTHS, "Tokens of answers", "total_output_tokens", outputs)
        prompts = [(labels, activity.prompt_lengths) for labels, activity in activities]
        yield _lengths(_INPUT_LENGTHS, "Tokens of answered prompts", "total_input_tokens", prompts)


def last_iteration(text: "LlmText") -> IterationStats:
    """Return TensorRT-LLM's own numbers, and for absent ones and other engines what the gateway knows."""
    derived, stats = _derive_iteration(text), text.engine.stats
    if stats.iteration is None:
        return derived
    reported = {name: value for name, value in msgspec.structs.asdict(stats.iteration).items() if value is not None}
    stale = _BATCH_FIELDS if stats.num_running == 0 else set()
    return msgspec.structs.replace(derived, **{name: value for name, value in reported.items() if name not in stale})


def _derive_iteration(text: "LlmText") -> IterationStats:
    stats, info, unstarted = text.engine.stats, text.info, text.activity.unstarted()
    num_context = min(max(unstarted.num_requests - stats.num_waiting, 0), stats.num_running)
    context_tokens = max(unstarted.num_prompt_tokens - stats.num_tokens_waiting, 0) if num_context else 0
    never_pauses = find_policy(info.scheduler_policy).reserves_worst_case
    return IterationStats(
        iteration=stats.steps_total,
        latency_ms=0.0,
        timestamp_us=round((time.time() - text.engine.heartbeat_age_s()) * _US_PER_S),
        num_active=stats.num_running + stats.num_waiting,
        max_active=info.max_num_seqs,
        num_scheduled=stats.num_running,
        num_context=num_context,
        num_generation=stats.num_running - num_context,
        num_paused=0 if never_pauses else None,
        context_tokens=context_tokens,
        micro_batch_id=0,
        max_blocks=info.capacity_blocks,
        free_blocks=stats.num_blocks_free,
        used_blocks=stats.num_blocks_used,
        tokens_per_block=info.block_size,
        reused_blocks=stats.cached_tokens_total // info.block_size,
    )


def _values(gauge: _Gauge, iterations: Iterable[tuple[Labels, IterationStats]]) -> Iterator[tuple[Labels, float]]:
    for labels, iteration in iterations:
        for kind, read in gauge.values.items():
            value = read(iteration)
            if value is not None:
                yield {**labels, gauge.label: kind}, value


def _lengths(name: str, text: str, kind: str, histograms: "Iterable[tuple[Labels, Histogram]]") -> Metric:
    made = empty_family(name, text, "histogram")
    for labels, histogram in histograms:
        add_histogram(made, {**labels, "response_metric_type": kind}, histogram)
    return made
