"""Metrics of kept streams: how many, how large, and what clients that come back find."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.answers.streams.store import StreamStore

COUNTERS = (
    ("resumption", "sluice_stream_resumptions", "Clients that came back to a stream: resumed, or missing."),
    ("replay", "sluice_idempotent_requests", "Requests whose key had come before: replayed, shared, or conflict."),
    ("takeover", "sluice_stream_takeovers", "Streams of a gateway that was gone: done, or impossible."),
    ("expired", "sluice_stream_expiries", "Streams whose time was over: live (cancelled), or ended (dropped)."),
    ("unshared", "sluice_stream_unshared", "Streams kept here alone, as begun without room or Redis, or as grown."),
)
"""Kinds of the store's counts, with the counters' names and what their outcomes are."""


class StreamCollector(Collector):
    """Turns the numbers of a store of streams into families at each scrape, on the event loop's thread."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        kept = GaugeMetricFamily("sluice_kept_streams", "Streams and answers that are kept.", labels=("state",))
        for state, number in self._store.num_kept.items():
            kept.add_metric((state,), number)
        yield kept
        num_bytes = GaugeMetricFamily("sluice_kept_stream_bytes", "Bytes of kept streams and answers, in memory.")
        num_bytes.add_metric((), self._store.num_bytes)
        yield num_bytes
        shared = self._store.shared
        if shared is not None:
            up = GaugeMetricFamily("sluice_stream_store_up", "Whether streams are shared through Redis: 1 or 0.")
            up.add_metric((), float(not shared.problem))
            yield up
        for kind, name, text in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("outcome",))
            for (which, outcome), number in self._store.counts.items():
                if which == kind:
                    counter.add_metric((outcome,), number)
            yield counter
