import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.goodput import parse_targets
from sluice.gateway.telemetry.families import BucketFamily
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.record import ITL_BUCKETS_S
from sluice.pipelines.text.types import TextEvent
from sluice.record.histogram import Histogram
from sluice.record.spans import parse_traceparent, remote_parent
from tests.clock import ManualClock

SAMPLED = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def event(num_tokens: int = 1, finish_reason: FinishReason | None = None) -> TextEvent:
    return TextEvent("x", num_tokens, 7, num_tokens, finish_reason)


@pytest.fixture
def clock() -> ManualClock[float]:
    return ManualClock(1000.0)


@pytest.fixture
def metrics(clock: ManualClock[float]) -> GatewayMetrics:
    return GatewayMetrics(clock)


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    """Return one sample from the text that Prometheus reads."""
    text = generate_latest(metrics.registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next((sample.value for sample in samples if sample.name == name and sample.labels == labels), None)


def test_a_request_s_times_and_tokens(metrics: GatewayMetrics, clock: ManualClock[float]) -> None:
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
    counted, family = Histogram(ITL_BUCKETS_S), BucketFamily("gaps", "Gaps.", ITL_BUCKETS_S, ())
    counted.add(seconds)
    family.add((), counted)
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name == "gaps_bucket"}
    expected = {str(bound): float(seconds <= bound) for bound in ITL_BUCKETS_S} | {"+Inf": 1.0}
    assert buckets == expected


def test_prompt_tokens_that_are_known_at_the_end_count(metrics: GatewayMetrics) -> None:
    record = metrics.open_request("hosted", "openai")
    record.observe(TextEvent("x", 1, 0, 1))
    record.observe(TextEvent("", 1, 12, 2, FinishReason.STOP))
    record.close()
    assert value(metrics, "sluice_prompt_tokens_total", model="hosted") == 12


def test_requests_are_open_until_they_end(metrics: GatewayMetrics) -> None:
    labels = {"model": "rill", "protocol": "v2"}
    first, second = metrics.open_request("rill", "v2"), metrics.open_request("rill", "v2")
    assert value(metrics, "sluice_open_requests", **labels) == 2
    first.close()
    second.fail(KeyError("bug"))
    second.close()
    assert value(metrics, "sluice_open_requests", **labels) == 0


def test_the_mean_time_of_a_token_after_the_first(metrics: GatewayMetrics, clock: ManualClock[float]) -> None:
    record = metrics.open_request("rill", "v2")
    clock.now += 5
    record.observe(TextEvent("a", 1, 7, 1))
    clock.now += 0.4
    record.observe(TextEvent("bc", 8, 7, 9, FinishReason.LENGTH))
    record.close()
    assert value(metrics, "sluice_time_per_output_token_seconds_sum", model="rill") == pytest.approx(0.05)


@pytest.mark.parametrize("reason", [None, FinishReason.STOP])
def test_one_token_or_a_broken_stream_has_no_such_mean(
    metrics: GatewayMetrics, clock: ManualClock[float], reason: FinishReason | None
) -> None:
    record = metrics.open_request("rill", "v2")
    record.observe(TextEvent("a", 1, 7, 1))
    clock.now += 1
    record.observe(TextEvent("", 0, 7, 1, reason))
    record.close()
    assert value(metrics, "sluice_time_per_output_token_seconds_count", model="rill") is None


def answer(metrics: GatewayMetrics, clock: ManualClock[float], *gaps_s: float, ttft_s: float = 0.1) -> None:
    """Answer one request of `rill`, whose tokens come at those distances."""
    record = metrics.open_request("rill", "v2")
    clock.now += ttft_s
    record.observe(event())
    for number, gap_s in enumerate(gaps_s, 2):
        clock.now += gap_s
        record.observe(TextEvent("x", 1, 7, number, FinishReason.STOP if number > len(gaps_s) else None))
    record.close()


def goodput(metrics: GatewayMetrics, **labels: str) -> float | None:
    name = "sluice_goodput_misses_total" if "target" in labels else "sluice_goodput_requests_total"
    return value(metrics, name, model="rill", **labels)


def test_goodput_counts_requests_by_the_targets_that_they_miss(clock: ManualClock[float]) -> None:
    metrics = GatewayMetrics(clock, parse_targets("ttft=200,itl=50,tpot=40,e2e=5000"))
    answer(metrics, clock, 0.01, 0.01)
    answer(metrics, clock, 0.01, 0.01, ttft_s=0.3)
    answer(metrics, clock, 0.06, 0.01)  # half of the gaps are too long, their mean is not
    answer(metrics, clock, *[0.01] * 199, 0.06)  # one in two hundred may be
    answer(metrics, clock, *[0.045] * 3)
    answer(metrics, clock, *[0.03] * 200)
    for failed in (SluiceError(ErrorCode.OVERLOADED, "full"), SluiceError(ErrorCode.INVALID, "bad"), None):
        record = metrics.open_request("rill", "v2")
        if failed is not None:
            record.fail(failed)
        record.close()
    assert goodput(metrics, result="met") == 2
    assert goodput(metrics, result="missed") == 5
    missed = {target: goodput(metrics, target=target) for target in ("ttft", "itl", "tpot", "e2e", "error")}
    assert missed == {"ttft": 1, "itl": 1, "tpot": 1, "e2e": 1, "error": 1}


def test_without_targets_there_is_no_goodput(metrics: GatewayMetrics, clock: ManualClock[float]) -> None:
    answer(metrics, clock, 0.01)
    assert goodput(metrics, result="met") is None
    judged = GatewayMetrics(clock, parse_targets("ttft=1"))
    judged.open_request("rill", "v2")
    assert goodput(judged, result="met") == 0  # a rate needs the series before its first request


def test_tokens_of_answers_that_were_cut_off_are_aborted(metrics: GatewayMetrics) -> None:
    labels = {"model": "rill", "protocol": "v2"}
    record = metrics.open_request("rill", "v2")
    record.observe(event(num_tokens=3))
    record.close()
    record = metrics.open_request("rill", "v2")
    record.observe(TextEvent("x", 4, 7, 4, FinishReason.LENGTH, cached_tokens=5))
    record.close()
    kinds = ("prompt", "cached", "generation", "aborted")
    found = {kind: value(metrics, "sluice_tokens_total", **labels, kind=kind) for kind in kinds}
    assert found == {"prompt": 14, "cached": 5, "generation": 7, "aborted": 3}
    reasons = ("length", "cancelled")
    finished = [value(metrics, "sluice_finished_requests_total", model="rill", reason=reason) for reason in reasons]
    assert finished == [1, 1]


async def test_lengths_and_adapters_of_requests(metrics: GatewayMetrics) -> None:
    labels = {"model": "rill", "adapter": "poet"}
    record = metrics.open_request("rill", "v2")
    await record.admit(7, 32, "poet")
    assert value(metrics, "sluice_adapter_requests", **labels, state="waiting") == 1
    record.observe(event(num_tokens=2))
    assert value(metrics, "sluice_adapter_requests", **labels, state="waiting") == 0
    assert value(metrics, "sluice_adapter_requests", **labels, state="running") == 1
    record.observe(TextEvent("x", 3, 7, 5, FinishReason.STOP))
    record.close()
    assert value(metrics, "sluice_adapter_requests", **labels, state="running") == 0
    sums = ("sluice_request_max_tokens", "sluice_request_prompt_tokens", "sluice_request_generation_tokens")
    assert [value(metrics, f"{name}_sum", model="rill") for name in sums] == [32, 7, 5]


async def test_models_and_adapters_beyond_many_have_no_name(
    metrics: GatewayMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.gateway.telemetry.metrics.MAX_MODELS", 2)
    monkeypatch.setattr("sluice.gateway.telemetry.record.MAX_ADAPTERS", 1)
    for model in ("a", "b", "c", "d", "a"):
        record = metrics.open_request(model, "v2")
        await record.admit(1, 1, f"{model}-poet")
        record.close()
    labels = {"protocol": "v2", "outcome": "cancelled"}
    counts = [value(metrics, "sluice_requests_total", model=model, **labels) for model in ("a", "b", "c", "other")]
    assert counts == [2, 1, None, 2]
    adapters = [
        sample.labels["adapter"]
        for each in metrics.collect()
        for sample in each.samples
        if sample.name == "sluice_adapter_requests"
    ]
    assert set(adapters) == {"a-poet", "other"}


@pytest.mark.parametrize(
    ("traceparent", "trace_id"), [(SAMPLED, "ab" * 16), (SAMPLED[:-2] + "00", ""), ("nonsense", "")]
)
def test_exemplars_name_sampled_traces(
    metrics: GatewayMetrics, clock: ManualClock[float], traceparent: str, trace_id: str
) -> None:
    before = remote_parent.set(parse_traceparent(traceparent))
    answer(metrics, clock, 0.01, ttft_s=0.03)
    remote_parent.reset(before)
    families = openmetrics.text_string_to_metric_families(openmetrics_latest(metrics.registry).decode())  # type: ignore[no-untyped-call]
    [ttft] = [family for family in families if family.name == "sluice_time_to_first_token_seconds"]
    exemplars = {sample.labels["le"]: sample.exemplar for sample in ttft.samples if sample.exemplar}
    if not trace_id:
        assert exemplars == {}
    else:
        assert [(le, each.labels, each.value) for le, each in exemplars.items()] == [
            ("0.04", {"trace_id": trace_id, "span_id": "cd" * 8}, pytest.approx(0.03))
        ]
