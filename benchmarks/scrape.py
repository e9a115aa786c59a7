"""Measures how long a scrape of the metrics page holds up the event loop, by the number of models.

    python -m benchmarks.scrape [--models 100] [--repeats 15]

Each model is a language model with an engine, requests in two protocols, and Triton's families. The page is collected
and written in both formats, without other servers' names and with all of them. Medians of the repeats, and the least.
Times are the processor's, of the one thread that works, so that other processes do not count.
"""

import argparse
import statistics
from collections.abc import Iterator
from time import thread_time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sluice.engine.client.supervision import RecoveryCounts
from sluice.engine.loop.recorder import Step, WorkRecorder
from sluice.engine.statistics import NO_STATS
from sluice.engine.types import EngineInfo, FinishReason
from sluice.gateway.options.goodput import GoodputTargets
from sluice.gateway.options.telemetry import ALIAS_FAMILIES
from sluice.gateway.telemetry.aliases import AliasedRegistry
from sluice.gateway.telemetry.engine import NamedEngine, engine_families
from sluice.gateway.telemetry.exposition import choose_writer
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.page import InferenceCollector
from sluice.heap import settle_objects
from sluice.pipelines.text.types import TextEvent
from sluice.serving.model import Model
from sluice.serving.statistics import ModelStatistics

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
_INFO = EngineInfo(
    runtime="openvino",
    model_type="llama",
    dtype="bf16",
    vocab_size=8,
    eos_token_ids=(1,),
    max_model_len=8192,
    block_size=16,
    num_blocks=1000,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    load_seconds=1.0,
)


class _Engines(Collector):
    """Collects the families of so many engines."""

    def __init__(self, names: list[str]) -> None:
        recorder = WorkRecorder()
        recorder.record_step(Step(3, 3, 37, 40, 0.01, 0.009))
        stats = msgspec.structs.replace(NO_STATS, num_running=3, steps_total=9, histograms=recorder.histograms())
        engine = SimpleNamespace(stats=stats, recoveries=RecoveryCounts(), heartbeat_age_s=lambda: 0.1)
        self._named = [NamedEngine(name, "1", cast(Any, engine), _INFO) for name in names]

    def collect(self) -> Iterator[Metric]:
        return engine_families(self._named)


def make_registry(num_models: int) -> CollectorRegistry:
    """Return the registry of a server with so many language models, each of which has answered requests."""
    metrics = GatewayMetrics(targets=GoodputTargets(ttft=1.0))
    names = [f"model-{number}" for number in range(num_models)]
    for name in names:
        for protocol in ("openai_chat", "v2_grpc"):
            record = metrics.open_request(name, protocol)
            record.observe(TextEvent("x", 1, 7, 1))
            record.observe(TextEvent("y", 2, 7, 3, FinishReason.STOP))
            record.close()
    metrics.registry.register(_Engines(names))
    config = SimpleNamespace(metric_tags={})
    models = [
        SimpleNamespace(name=name, config=config, spec=SimpleNamespace(version=1), statistics=ModelStatistics())
        for name in names
    ]
    metrics.registry.register(InferenceCollector(lambda: cast(list[Model], models)))
    return metrics.registry


def measure(registry: CollectorRegistry, accept: str, repeats: int, *, is_ours: bool) -> tuple[float, float, int]:
    """Return the median and the least milliseconds of a scrape, and the lines of the page."""
    write, _ = choose_writer(accept) if is_ours else choose_encoder(accept)
    times = []
    for _ in range(repeats):
        started = thread_time()
        page = write(registry)
        times.append((thread_time() - started) * 1e3)
    return statistics.median(times), min(times), page.count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    own = make_registry(options.models)
    settle_objects()  # as the server does once it serves
    for title, accept in (("text", ""), ("OpenMetrics", OPENMETRICS)):
        for aliases in ((), ALIAS_FAMILIES):
            registry = AliasedRegistry(own, aliases)
            ours, least, num_lines = measure(registry, accept, options.repeats, is_ours=True)
            library, _, _ = measure(registry, accept, max(options.repeats // 5, 1), is_ours=False)
            names = "with all aliases" if aliases else "without aliases"
            figures = f"{ours:6.1f} ms, least {least:6.1f}; the library's writer {library:6.1f}"
            print(f"{title:12} {names:17} {num_lines:7,} lines  {figures}")


if __name__ == "__main__":
    main()
