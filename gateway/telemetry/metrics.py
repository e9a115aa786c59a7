"""The gateway's own counts, as Prometheus families. docs/metrics.md explains each to an operator.

All are plain numbers (`tallies.py`), turned into families at each scrape. They belong to the event loop's thread, the
scrape too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.options.goodput import GoodputTargets
from sluice.gateway.telemetry.buckets import BucketFamily, ValueFamily
from sluice.gateway.telemetry.families import GAUGE
from sluice.gateway.telemetry.record import RequestRecord
from sluice.gateway.telemetry.tallies import HISTOGRAMS, RequestTally
from sluice.record.histogram import Histogram

OTHER = "other"
"""The name of models and adapters that are too many to be named."""
MAX_MODELS = 1000
MAX_ADAPTERS = 100
"""Most models, and most adapters, that labels name: those that came first. Their names may come from clients."""


class _Declared(NamedTuple):
    """A family of one histogram of the tallies."""

    name: str
    text: str
    attribute: str


_DISTRIBUTIONS = (
    _Declared(
        "sluice_time_to_first_token_seconds",
        "From taking a request to its first token: tokenizing, queueing and prefill.",
        "time_to_first_token",
    ),
    _Declared(
        "sluice_time_per_output_token_seconds",
        "Mean time of each token after the first, of answered requests.",
        "time_per_output_token",
    ),
    _Declared(
        "sluice_request_duration_seconds", "From taking a request to its end, however it ended.", "request_duration"
    ),
    _Declared(
        "sluice_inter_token_latency_seconds", "Gap between successive events of a request.", "inter_token_latency"
    ),
    _Declared(
        "sluice_request_decode_seconds", "From the first token to the last, of answered requests.", "decode_duration"
    ),
    _Declared("sluice_request_prompt_tokens", "Tokens of the prompts of answered requests.", "prompt_length"),
    _Declared("sluice_request_generation_tokens", "Tokens of answers.", "output_length"),
    _Declared("sluice_request_max_tokens", "Most tokens that requests allow their answers.", "max_tokens"),
)


class GatewayMetrics(Collector):
    """The gateway's families, in `registry`, which is not the library's global one."""

    def __init__(self, clock: Callable[[], float] = perf_counter, targets: GoodputTargets | None = None) -> None:
        self.clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        self.tallies: dict[tuple[str, str], RequestTally] = {}
        """Tallies by model and protocol."""
        self._targets = targets
        self._models: set[str] = set()
        self._adapters = OpenAdapters()
        self._responses: dict[tuple[str, int], int] = defaultdict(int)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count_response(self, protocol: str, status: int) -> None:
        self._responses[protocol, status] += 1

    def open_request(self, model: str, protocol: str) -> RequestRecord:
        """Begin to measure a request. The caller closes the record at its end."""
        tally = self.tallies.get((model, protocol)) or self._tally(model, protocol)
        return RequestRecord(tally, model, protocol, self.clock, self._targets, self._adapters)

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
        responses = CounterMetricFamily(
            "sluice_http_responses",
            "HTTP answers by protocol and status, refused ones included.",
            labels=("protocol", "status"),
        )
        for (protocol, status), count in self._responses.items():
            responses.add_metric((protocol, str(status)), count)
        return *self._model_families(), *self._protocol_families(), self._adapters.family(), responses

    def _model_families(self) -> Iterable[Metric]:
        tallies: dict[str, list[RequestTally]] = {}
        for (model, _), tally in self.tallies.items():
            tallies.setdefault(model, []).append(tally)
        yield _counts(
            "sluice_finished_requests",
            "Ended requests, by finish reason: stop, length, cancelled or error.",
            "reason",
            {model: [tally.finishes for tally in each] for model, each in tallies.items()},
        )
        yield from self._goodput(tallies)
        prompt = ValueFamily("sluice_prompt_tokens", "Prompt tokens of answered requests.", "counter", ("model",))
        generated = ValueFamily("sluice_generation_tokens", "Tokens sent to clients.", "counter", ("model",))
        for model, each in tallies.items():
            prompt.add((model,), float(sum(tally.prompt_tokens for tally in each)))
            generated.add((model,), float(sum(tally.generation_tokens for tally in each)))
        yield prompt
        yield generated
        for declared in _DISTRIBUTIONS:
            yield _distribution(declared, tallies)

    def _goodput(self, tallies: Mapping[str, Sequence[RequestTally]]) -> Iterable[Metric]:
        """Yield the families of goodput; without targets they are empty."""
        judged = tallies if self._targets is not None else {}
        yield _counts(
            "sluice_goodput_requests",
            "Requests by whether they met every target of --slo: met or missed. The server's failures missed them.",
            "result",
            {model: [tally.goodput for tally in each] for model, each in judged.items()},
        )
        yield _counts(
            "sluice_goodput_misses",
            "Targets that requests missed: ttft, itl, tpot, e2e, or error for a failure of the server.",
            "target",
            {model: [tally.misses for tally in each] for model, each in judged.items()},
        )

    def _protocol_families(self) -> Iterable[Metric]:
        labels = ("model", "protocol")
        requests = ValueFamily(
            "sluice_requests",
            "Requests that reached a model, by how they ended: ok, cancelled, or an error code.",
            "counter",
            (*labels, "outcome"),
        )
        tokens = ValueFamily(
            "sluice_tokens",
            "Tokens by kind: of answered prompts (prompt) and of those found in a cache (cached), sent to clients "
            "(generation), and of those in answers that were cut off (aborted).",
            "counter",
            (*labels, "kind"),
        )
        text = "Requests that have reached a model and not ended."
        open_requests = ValueFamily("sluice_open_requests", text, GAUGE, labels)
        for key, tally in self.tallies.items():
            for outcome, count in tally.outcomes.items():
                requests.add((*key, outcome), float(count))
            for kind, value in _tokens_by_kind(tally).items():
                tokens.add((*key, kind), float(value))
            open_requests.add(key, float(tally.num_open))
        return requests, tokens, open_requests


class OpenAdapters:
    """The open requests of each LoRA adapter, by whether they have a token yet."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._names: set[tuple[str, str]] = set()

    def move(self, model: str, adapter: str, before: str, now: str) -> None:
        if len(self._names) < MAX_ADAPTERS:
            self._names.add((model, adapter))
        name = adapter if (model, adapter) in self._names else OTHER
        for state, change in ((before, -1), (now, 1)):
            if state:
                self._counts[model, name, state] += change

    def family(self) -> Metric:
        family = GaugeMetricFamily(
            "sluice_adapter_requests",
            "Open requests of a LoRA adapter: waiting for their first token, or running. 100 adapters are named.",
            labels=("model", "adapter", "state"),
        )
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        return family


def _tokens_by_kind(tally: RequestTally) -> dict[str, int]:
    return {
        "prompt": tally.prompt_tokens,
        "cached": tally.cached_tokens,
        "generation": tally.generation_tokens,
        "aborted": tally.aborted_tokens,
    }


def _distribution(declared: _Declared, tallies: Mapping[str, Sequence[RequestTally]]) -> Metric:
    """Return a family with the series of each model that has counted anything, in all protocols."""
    family = BucketFamily(declared.name, declared.text, HISTOGRAMS[declared.attribute], ("model",))
    for model, each in tallies.items():
        first, *others = (getattr(tally, declared.attribute) for tally in each)
        counted: Histogram = first.merged(others) if others else first
        if any(counted.counts):
            family.add((model,), counted)
    return family


def _counts(name: str, text: str, label: str, counts: Mapping[str, Iterable[Mapping[str, int]]]) -> Metric:
    family = ValueFamily(name, text, "counter", ("model", label))
    for model, parts in counts.items():
        sums: dict[str, int] = {}
        for part in parts:
            for value, count in part.items():
                sums[value] = sums.get(value, 0) + count
        for value, count in sums.items():
            family.add((model, value), float(count))
    return family
