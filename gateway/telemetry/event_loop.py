"""How busy and how late the event loop of a process is, which everything but the engines' steps goes through."""

import asyncio
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

PROBE_S = 0.2
"""Seconds between two looks at how late the loop is; a look takes some ten microseconds."""


class EventLoopMonitor(Collector):
    """Measures one event loop: the processor's time of its thread, and how late a timer of it fires. Belongs to that
    loop's thread, the scrape too."""

    def __init__(self, process: str) -> None:
        """`process` is the label of the samples: "gateway", or "worker-N"."""
        self._process = process
        self._lag_s = 0.0
        self._num_probes = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PROBE_S, self._probe, loop, loop.time() + PROBE_S)

    async def close(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _probe(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._lag_s += max(0.0, now - due)
        self._num_probes += 1
        self._timer = loop.call_later(PROBE_S, self._probe, loop, now + PROBE_S)

    def collect(self) -> Iterable[Metric]:
        """Return the families of this process."""
        busy = CounterMetricFamily(
            "sluice_event_loop_cpu_seconds",
            "Processor time of the thread that all requests of a process (gateway, worker-N) go through.",
            labels=("process",),
        )
        busy.add_metric((self._process,), time.thread_time())
        lag = SummaryMetricFamily(
            "sluice_event_loop_lag_seconds", "How late that thread comes to work that is due.", labels=("process",)
        )
        lag.add_metric((self._process,), self._num_probes, self._lag_s)
        return busy, lag
