"""All of the metrics page but what the gateway and its engines count: put together from the settings."""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry

from gateway.options.metrics_settings import MetricsSettings
from gateway.telemetry.custom import CustomMetricRegistry
from gateway.telemetry.gpu import GpuSampler
from gateway.telemetry.inference import InferenceCollector
from gateway.telemetry.trt_llm import TrtLlmCollector
from serving.latencies import LatencyOptions
from serving.model import Model
from serving.statistics import CacheUsage


class MetricsPage:
    """Triton's families and those of models, in `registry`. Begins to watch the GPUs; `close` ends that."""

    def __init__(
        self,
        registry: CollectorRegistry,
        models: Callable[[], Iterable[Model]],
        settings: MetricsSettings,
        cache: CacheUsage | None = None,
    ) -> None:
        """`models` is asked at each scrape. `cache`: of the server's response cache, where it has one."""
        self.custom = CustomMetricRegistry()
        self._gpus = GpuSampler(settings.interval_s)
        if settings.is_allowed:
            registry.register(InferenceCollector(models, settings, cache, lambda: self._gpus.samples))
            registry.register(TrtLlmCollector(models))
            registry.register(self.custom)
        if settings.allows_gpu:
            self._gpus.start()

    async def close(self) -> None:
        """Idempotent."""
        await asyncio.to_thread(self._gpus.close)


def latency_options(settings: MetricsSettings) -> LatencyOptions:
    """What has to be measured of every model for the page to show it."""
    if not settings.is_allowed:
        return LatencyOptions()
    return LatencyOptions(settings.has_summaries, settings.has_histograms)
