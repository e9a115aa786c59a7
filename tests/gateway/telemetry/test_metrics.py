import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.types import FinishReason
from gateway.telemetry.metrics import ITL_BUCKETS_S, GatewayMetrics, TokenTally
from pipelines.text.types import TextEvent
from sluice.errors import ErrorCode, SluiceError


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def event(num_tokens: int = 1, finish_reason: FinishReason | None = None) -> TextEvent:
    return TextEvent("x", num_tokens, 7, num_tokens, finish_reason)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> GatewayMetrics:
    return GatewayMetrics(clock)


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    """Return one sample from the text that Prometheus reads."""
    text = generate_latest(metrics.registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next((sample.value for sample in samples if sample.name == name and sample.labels == labels), None)


def test_a_request_s_times_and_tokens(metrics: GatewayMetrics, clock: Clock) -> None:
    record = metrics.open_request("rill", "openai")
    clock.now += 0.03
    record.observe(event())
    clock.now += 0.004
    record.observe(event(num_tokens=3))
    clock.now += 0.2
    record.observe(event(finish_reason=FinishReason.STOP))
    clock.now += 0.1
    record.close()
    assert value(metrics, "sluice_requests_total", model="rill", protocol="openai", outcome="ok") == 1
    assert value(metrics, "sluice_prompt_tokens_total", model="rill") == 7
    assert value(metrics, "sluice_generation_tokens_total", model="rill") == 5
    ttft, itl = "sluice_time_to_first_token_seconds", "sluice_inter_token_latency_seconds"
    assert value(metrics, f"{ttft}_sum", model="rill") == pytest.approx(0.03)
    assert value(metrics, f"{ttft}_bucket", model="rill", le="0.02") == 0
    assert value(metrics, f"{ttft}_bucket", model="rill", le="0.04") == 1
    assert value(metrics, f"{itl}_sum", model="rill") == pytest.approx(0.204)
    assert value(metrics, f"{itl}_count", model="rill") == 2
    assert value(metrics, f"{itl}_bucket", model="rill", le="0.003") == 0
    assert value(metrics, f"{itl}_bucket", model="rill", le="0.005") == 1
    assert value(metrics, f"{itl}_bucket", model="rill", le="+Inf") == 2
    assert value(metrics, "sluice_request_duration_seconds_sum", model="rill") == pytest.approx(0.334)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SluiceError(ErrorCode.OVERLOADED, "full"), "overloaded"),
        (SluiceError(ErrorCode.INVALID, "bad"), "invalid"),
        (KeyError("bug"), "internal"),
    ],
)
def test_failures_count_by_code(metrics: GatewayMetrics, error: Exception, outcome: str) -> None:
    record = metrics.open_request("rill", "v2")
    record.fail(error)
    record.close()
    assert value(metrics, "sluice_requests_total", model="rill", protocol="v2", outcome=outcome) == 1
    assert value(metrics, "sluice_time_to_first_token_seconds_count", model="rill") is None


def test_a_client_that_left_counts_as_cancelled(metrics: GatewayMetrics) -> None:
    record = metrics.open_request("rill", "v2")
    record.observe(event())
    record.close()
    assert value(metrics, "sluice_requests_total", model="rill", protocol="v2", outcome="cancelled") == 1


@pytest.mark.parametrize("seconds", [0.0, *ITL_BUCKETS_S, 99.0])
def test_a_gap_on_a_bound_belongs_to_it(seconds: float) -> None:
    tally = TokenTally()
    tally.add_gap(seconds)
    buckets = dict(tally.buckets())
    expected = {str(bound): float(seconds <= bound) for bound in ITL_BUCKETS_S} | {"+Inf": 1.0}
    assert buckets == expected


def test_two_registries_do_not_meet(metrics: GatewayMetrics) -> None:
    other = GatewayMetrics()
    metrics.open_request("rill", "v2").close()
    assert value(metrics, "sluice_requests_total", model="rill", protocol="v2", outcome="cancelled") == 1
    assert value(other, "sluice_requests_total", model="rill", protocol="v2", outcome="cancelled") is None


def test_prompt_tokens_that_are_known_at_the_end_count(metrics: GatewayMetrics) -> None:
    record = metrics.open_request("hosted", "openai")
    record.observe(TextEvent("x", 1, 0, 1))
    record.observe(TextEvent("", 1, 12, 2, FinishReason.STOP))
    record.close()
    assert value(metrics, "sluice_prompt_tokens_total", model="hosted") == 12


def test_tokens_are_told_by_protocol_too(metrics: GatewayMetrics, clock: Clock) -> None:
    for protocol in ("openai_chat", "v2_grpc", "v2_grpc"):
        record = metrics.open_request("rill", protocol)
        record.observe(event(num_tokens=2))
        clock.now += 0.02
        record.observe(event(num_tokens=3, finish_reason=FinishReason.STOP))
        record.close()
    labels = {"model": "rill", "protocol": "v2_grpc"}
    assert value(metrics, "sluice_tokens_total", **labels, kind="prompt") == 14
    assert value(metrics, "sluice_tokens_total", **labels, kind="generation") == 10
    assert value(metrics, "sluice_tokens_total", model="rill", protocol="openai_chat", kind="generation") == 5
    assert value(metrics, "sluice_generation_tokens_total", model="rill") == 15
    assert value(metrics, "sluice_inter_token_latency_seconds_count", model="rill") == 3
    assert value(metrics, "sluice_inter_token_latency_seconds_sum", model="rill") == pytest.approx(0.06)


def test_requests_are_open_until_they_end(metrics: GatewayMetrics) -> None:
    labels = {"model": "rill", "protocol": "v2"}
    first, second = metrics.open_request("rill", "v2"), metrics.open_request("rill", "v2")
    assert value(metrics, "sluice_open_requests", **labels) == 2
    first.close()
    second.fail(KeyError("bug"))
    second.close()
    assert value(metrics, "sluice_open_requests", **labels) == 0


def test_the_mean_time_of_a_token_after_the_first(metrics: GatewayMetrics, clock: Clock) -> None:
    record = metrics.open_request("rill", "v2")
    clock.now += 5
    record.observe(TextEvent("a", 1, 7, 1))
    clock.now += 0.4
    record.observe(TextEvent("bc", 8, 7, 9, FinishReason.LENGTH))
    record.close()
    assert value(metrics, "sluice_time_per_output_token_seconds_sum", model="rill") == pytest.approx(0.05)


@pytest.mark.parametrize("reason", [None, FinishReason.STOP])
def test_one_token_or_a_broken_stream_has_no_such_mean(
    metrics: GatewayMetrics, clock: Clock, reason: FinishReason | None
) -> None:
    record = metrics.open_request("rill", "v2")
    record.observe(TextEvent("a", 1, 7, 1))
    clock.now += 1
    record.observe(TextEvent("", 0, 7, 1, reason))
    record.close()
    assert value(metrics, "sluice_time_per_output_token_seconds_count", model="rill") is None
