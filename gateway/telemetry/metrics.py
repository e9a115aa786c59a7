"""The gateway's own counts, as Prometheus families. docs/metrics.md explains each to an operator.

Per request to an LLM the library's own metrics are used. Per token they cost four times as much as plain numbers
(1.1 against 0.3 microseconds: a lock and a loop over buckets each), so tokens, the gaps between them and
HTTP answers are kept as plain numbers, and turned into families at each scrape. All of it belongs to the event loop's
thread, the scrape too.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import add
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.calls import Call, current_call, note_model
from pipelines.text.types import TextEvent
from sluice.errors import ErrorCode, SluiceError

TTFT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
ITL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class TokenTally:
    """One model's open requests, tokens and gaps between events in one protocol, counted without a lock."""

    __slots__ = ("bucket_counts", "gap_seconds", "generation_tokens", "num_open", "prompt_tokens")

    def __init__(self) -> None:
        self.num_open = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.gap_seconds = 0.0
        self.bucket_counts = [0] * (len(ITL_BUCKETS_S) + 1)

    def add(self, other: "TokenTally") -> None:
        self.num_open += other.num_open
        self.prompt_tokens += other.prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.gap_seconds += other.gap_seconds
        self.bucket_counts = list(map(add, self.bucket_counts, other.bucket_counts))

    def add_gap(self, seconds: float) -> None:
        self.bucket_counts[bisect_left(ITL_BUCKETS_S, seconds)] += 1
        self.gap_seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus writes a histogram."""
        bounds = [*map(str, ITL_BUCKETS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.bucket_counts)), strict=True))


class RequestRecord:
    """Measurements of one request, from when the service took it to its end."""

    __slots__ = (
        "_admitted",
        "_call",
        "_clock",
        "_first_at",
        "_last",
        "_metrics",
        "_model",
        "_outcome",
        "_prompt_tokens",
        "_protocol",
        "_started",
        "_tally",
    )

    def __init__(self, metrics: "GatewayMetrics", tally: TokenTally, model: str, protocol: str) -> None:
        self._metrics = metrics
        self._tally = tally
        self._model = model
        self._protocol = protocol
        self._clock = metrics.clock
        self._started = self._clock()
        self._first_at = 0.0
        self._last = 0.0
        self._prompt_tokens = 0
        self._outcome = "cancelled"
        self._admitted = (0, 0)
        """Tokens of the prompt and of the answer that the observers have admitted."""
        tally.num_open += 1
        call = current_call.get()
        self._call = None if call is None or call.ended else call
        if self._call is not None:
            self._call.hold()

    async def admit(self, prompt_tokens: int, max_tokens: int, adapter: str = "") -> float | None:
        """Ask the observers of the current call, and return its sender's weight. Raises SluiceError where one refuses
        the generation, and FORBIDDEN for an adapter that the sender may not use."""
        call = self._call
        if call is not None:
            if adapter:
                note_model(call.model, adapter, is_checked=not call.route)  # targets need no right of their own
            await call.admit(prompt_tokens, max_tokens)
            self._admitted = (prompt_tokens, max_tokens)
        return None if call is None or call.identity is None else call.identity.weight

    def observe(self, event: TextEvent) -> None:
        """Count an event that is about to go to the client."""
        now = self._clock()
        tally = self._tally
        if self._last:
            tally.add_gap(now - self._last)
        else:
            self._first(now, event)
        self._last = now
        tally.generation_tokens += event.num_tokens
        if self._call is not None:
            self._call.generated_tokens += event.num_tokens
        if event.finish_reason is not None:
            self._outcome = "ok"
            self._count_prompt(event)
            if self._call is not None:
                self._call.cached_tokens += event.cached_tokens
                self._call.finish = event.finish_reason.value
            if event.completion_tokens > 1 and now > self._first_at:
                per_token_s = (now - self._first_at) / (event.completion_tokens - 1)
                self._metrics.time_per_output_token.labels(self._model).observe(per_token_s)

    def _first(self, now: float, event: TextEvent) -> None:
        self._first_at = now
        if self._call is not None:
            self._call.first_token = self._call.first_token or now
        self._count_prompt(event)
        self._metrics.time_to_first_token.labels(self._model).observe(now - self._started)

    def _count_prompt(self, event: TextEvent) -> None:
        """Count the prompt with the first event and the last: remote models report its tokens at the end."""
        added = event.prompt_tokens - self._prompt_tokens
        self._tally.prompt_tokens += added
        if self._call is not None:
            self._call.prompt_tokens += added
        self._prompt_tokens = event.prompt_tokens

    def fail(self, error: Exception) -> None:
        code = error.code if isinstance(error, SluiceError) else ErrorCode.INTERNAL
        self._outcome = code.value

    def close(self) -> None:
        """End the request; without a finish reason or a failure, its client has disconnected."""
        self._tally.num_open -= 1
        self._metrics.request_duration.labels(self._model).observe(self._clock() - self._started)
        self._metrics.requests.labels(self._model, self._protocol, self._outcome).inc()
        call = self._call
        if call is not None:
            if call.route and not self._first_at:
                self._leave_to_others(call)
            elif self._outcome != "ok":
                call.finish = self._outcome
            call.release()

    def _leave_to_others(self, call: Call) -> None:
        """End a target's part in a call that names a route: what was admitted is there for the target that is asked
        next, and one that has answered before says how the call ends."""
        call.spare = (call.spare[0] + self._admitted[0], call.spare[1] + self._admitted[1])
        if not call.first_token:
            call.finish = self._outcome


class GatewayMetrics(Collector):
    """The gateway's families, in `registry`, which is not the library's global one."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        self._tallies: dict[tuple[str, str], TokenTally] = {}
        """Tallies by model and protocol."""
        self._responses: dict[tuple[str, int], int] = defaultdict(int)
        self.requests = Counter(
            "sluice_requests",
            "Requests that reached a model, by how they ended: ok, cancelled, or an error code.",
            ("model", "protocol", "outcome"),
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "sluice_time_to_first_token_seconds",
            "From taking a request to its first token: tokenizing, queueing and prefill.",
            ("model",),
            registry=self.registry,
            buckets=TTFT_BUCKETS_S,
        )
        self.time_per_output_token = Histogram(
            "sluice_time_per_output_token_seconds",
            "Mean time of each token after the first, of answered requests.",
            ("model",),
            registry=self.registry,
            buckets=TPOT_BUCKETS_S,
        )
        self.request_duration = Histogram(
            "sluice_request_duration_seconds",
            "From taking a request to its end, however it ended.",
            ("model",),
            registry=self.registry,
            buckets=DURATION_BUCKETS_S,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count_response(self, protocol: str, status: int) -> None:
        self._responses[protocol, status] += 1

    def open_request(self, model: str, protocol: str) -> RequestRecord:
        """Begin to measure a request. The caller closes the record at its end."""
        tally = self._tallies.get((model, protocol))
        if tally is None:
            tally = self._tallies[model, protocol] = TokenTally()
        return RequestRecord(self, tally, model, protocol)

    def collect(self) -> Iterable[Metric]:
        """Return the families of the plain numbers."""
        responses = CounterMetricFamily(
            "sluice_http_responses",
            "HTTP answers by protocol and status, refused ones included.",
            labels=("protocol", "status"),
        )
        for (protocol, status), count in self._responses.items():
            responses.add_metric((protocol, str(status)), count)
        return *self._model_families(), *self._protocol_families(), responses

    def _model_families(self) -> Iterable[Metric]:
        prompt = CounterMetricFamily("sluice_prompt_tokens", "Prompt tokens of answered requests.", labels=("model",))
        generated = CounterMetricFamily("sluice_generation_tokens", "Tokens sent to clients.", labels=("model",))
        gaps = HistogramMetricFamily(
            "sluice_inter_token_latency_seconds", "Gap between successive events of a request.", labels=("model",)
        )
        for model, tally in self._by_model().items():
            prompt.add_metric((model,), tally.prompt_tokens)
            generated.add_metric((model,), tally.generation_tokens)
            gaps.add_metric((model,), tally.buckets(), tally.gap_seconds)
        return prompt, generated, gaps

    def _by_model(self) -> dict[str, TokenTally]:
        tallies: dict[str, TokenTally] = {}
        for (model, _), tally in self._tallies.items():
            tallies.setdefault(model, TokenTally()).add(tally)
        return tallies

    def _protocol_families(self) -> Iterable[Metric]:
        labels = ("model", "protocol")
        tokens = CounterMetricFamily(
            "sluice_tokens", "Tokens of answered prompts, and tokens sent to clients.", labels=(*labels, "kind")
        )
        open_requests = GaugeMetricFamily(
            "sluice_open_requests", "Requests that have reached a model and not ended.", labels=labels
        )
        for key, tally in self._tallies.items():
            tokens.add_metric((*key, "prompt"), tally.prompt_tokens)
            tokens.add_metric((*key, "generation"), tally.generation_tokens)
            open_requests.add_metric(key, tally.num_open)
        return tokens, open_requests
