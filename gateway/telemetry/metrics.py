"""The gateway's own counts, as Prometheus families. docs/metrics.md explains each to an operator.

All are plain numbers (`record.py`), turned into families at each scrape. They belong to the event loop's thread, the
scrape too.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from sluice.gateway.options.goodput import GoodputTargets
from sluice.gateway.telemetry.families import (
    GAUGE,
    BucketFamily,
    Declared,
    DeclaredParts,
    Row,
    read_families,
    read_parts,
    value_family,
)
from sluice.gateway.telemetry.record import OTHER, OpenAdapters, RequestRecord, RequestTally
from sluice.pipelines.text.sessions import SessionTable
from sluice.record.histogram import Histogram

MAX_MODELS = 1000
"""Most models that labels name: those that came first. Their names may come from clients."""
PROBE_S = 0.2
"""Seconds between two looks at how late the event loop is; a look takes some ten microseconds."""


_DISTRIBUTIONS = (
    (
        "sluice_time_to_first_token_seconds",
        "From taking a request to its first token: tokenizing, queueing and prefill.",
        "time_to_first_token",
    ),
    (
        "sluice_time_per_output_token_seconds",
        "Mean time of each token after the first, of answered requests.",
        "time_per_output_token",
    ),
    ("sluice_request_duration_seconds", "From taking a request to its end, however it ended.", "request_duration"),
    ("sluice_inter_token_latency_seconds", "Gap between successive events of a request.", "inter_token_latency"),
    ("sluice_request_decode_seconds", "From the first token to the last, of answered requests.", "decode_duration"),
    ("sluice_request_prompt_tokens", "Tokens of the prompts of answered requests.", "prompt_length"),
    ("sluice_request_generation_tokens", "Tokens of answers.", "output_length"),
    ("sluice_request_max_tokens", "Most tokens that requests allow their answers.", "max_tokens"),
)
"""Families of the distributions of tallies: names, texts, and the attributes of `RequestTally`."""
_EMPTY = RequestTally()
_SUMS: tuple[Declared[list[RequestTally]], ...] = (
    ("sluice_prompt_tokens", "Prompt tokens of answered requests.", lambda each: sum(t.prompt_tokens for t in each)),
    ("sluice_generation_tokens", "Tokens sent to clients.", lambda each: sum(t.generation_tokens for t in each)),
)
_OPEN: Declared[RequestTally] = (
    "sluice_open_requests",
    "Requests that have reached a model and not ended.",
    lambda tally: tally.num_open,
)
_TOKENS: DeclaredParts[RequestTally] = (
    "counter",
    "sluice_tokens",
    "Tokens by kind: of answered prompts (prompt) and of those found in a cache (cached), sent to clients "
    "(generation), and of those in answers that were cut off (aborted).",
    "kind",
    {
        "prompt": lambda tally: tally.prompt_tokens,
        "cached": lambda tally: tally.cached_tokens,
        "generation": lambda tally: tally.generation_tokens,
        "aborted": lambda tally: tally.aborted_tokens,
    },
)


class GatewayMetrics(Collector):
    """The gateway's families, in `registry`, which is not the library's global one."""

    def __init__(self, clock: Callable[[], float] = perf_counter, targets: GoodputTargets | None = None) -> None:
        self.clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        self.tallies: dict[Row, RequestTally] = {}
        """Tallies by model and protocol."""
        self._targets = targets
        self._models: set[str] = set()
        self._adapters = OpenAdapters()
        self.sessions = SessionTable()
        """The sessions of all requests that are measured here."""
        self._responses: dict[tuple[str, int], int] = defaultdict(int)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count_response(self, protocol: str, status: int) -> None:
        self._responses[protocol, status] += 1

    def open_request(self, model: str, protocol: str) -> RequestRecord:
        """Begin to measure a request. The caller closes the record at its end."""
        tally = self.tallies.get((model, protocol)) or self._tally(model, protocol)
        return RequestRecord(tally, model, protocol, self.clock, self._targets, self._adapters, self.sessions)

    def _tally(self, model: str, protocol: str) -> RequestTally:
        """Return the tally of a model that has none in this protocol yet, or that is one of too many."""
        if len(self._models) < MAX_MODELS:
            self._models.add(model)
        key = model if model in self._models else OTHER, protocol
        if key not in self.tallies:
            self.tallies[key] = RequestTally()
        return self.tallies[key]

    def collect(self) -> Iterable[Metric]:
        """Return the families of the plain numbers."""
        by_model: dict[Row, list[RequestTally]] = {}
        for (model, _), tally in self.tallies.items():
            by_model.setdefault((model,), []).append(tally)
        yield from self._model_families(by_model)
        yield from self._protocol_families(self.tallies)
        yield value_family(
            "sluice_adapter_requests",
            "Open requests of a LoRA adapter: waiting for their first token, or running. 100 adapters are named.",
            GAUGE,
            ("model", "adapter", "state"),
            self._adapters.counts.items(),
        )
        yield value_family(
            "sluice_http_responses",
            "HTTP answers by protocol and status, refused ones included.",
            "counter",
            ("protocol", "status"),
            (((protocol, str(status)), count) for (protocol, status), count in self._responses.items()),
        )

    def _model_families(self, tallies: Mapping[Row, list[RequestTally]]) -> Iterable[Metric]:
        """Yield the families by model; those of goodput are empty without targets."""
        judged = tallies if self._targets is not None else {}
        text = "Ended requests, by finish reason: stop, length, cancelled or error."
        yield _counts("sluice_finished_requests", text, "reason", "finishes", tallies)
        text = "Requests by whether they met every target of --slo: met or missed. The server's failures missed them."
        yield _counts("sluice_goodput_requests", text, "result", "goodput", judged)
        text = "Targets that requests missed: ttft, itl, tpot, e2e, or error for a failure of the server."
        yield _counts("sluice_goodput_misses", text, "target", "misses", judged)
        yield from read_families("counter", _SUMS, ("model",), tallies)
        for declared in _DISTRIBUTIONS:
            yield _distribution(*declared, tallies)

    def _protocol_families(self, tallies: Mapping[Row, RequestTally]) -> Iterable[Metric]:
        labels = ("model", "protocol")
        yield value_family(
            "sluice_requests",
            "Requests that reached a model, by how they ended: ok, cancelled, or an error code.",
            "counter",
            (*labels, "outcome"),
            (((*row, outcome), count) for row, tally in tallies.items() for outcome, count in tally.outcomes.items()),
        )
        yield from read_parts((_TOKENS,), tallies, labels)
        yield from read_families(GAUGE, (_OPEN,), labels, tallies)


def _distribution(name: str, text: str, attribute: str, tallies: Mapping[Row, Sequence[RequestTally]]) -> Metric:
    """Return a family with the series of each model that has counted anything, in all protocols."""
    family = BucketFamily(name, text, getattr(_EMPTY, attribute).bounds, ("model",))
    for row, each in tallies.items():
        first, *others = (getattr(tally, attribute) for tally in each)
        counted: Histogram = first.merged(others) if others else first
        if any(counted.counts):
            family.add(row, counted)
    return family


def _counts(name: str, text: str, label: str, attribute: str, tallies: Mapping[Row, Sequence[RequestTally]]) -> Metric:
    """Return a family with the sums of each model's counters."""
    rows: list[tuple[Row, float]] = []
    for row, each in tallies.items():
        sums = Counter[str]()
        for tally in each:
            sums.update(getattr(tally, attribute))
        rows += [((*row, value), count) for value, count in sums.items()]
    return value_family(name, text, "counter", ("model", label), rows)


# -- the event loop, which everything but the engines' steps goes through


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
