"""The figures of a run, and their intervals of confidence."""

from array import array

import numpy as np
import pytest

from sluice.load.config import Slo
from sluice.load.stream import Failure, FailureKind, PlannedRequest, RequestResult
from sluice.load.summary import Distribution, RequestSamples, meets_slo, summarize


def result(
    times_s: list[float],
    *,
    intended_s: float = 0.0,
    started_s: float | None = None,
    ended_s: float | None = None,
    output_tokens: int | None = None,
    failure: Failure | None = None,
) -> RequestResult:
    return RequestResult(
        planned=PlannedRequest(0, [1, 2], 2, len(times_s)),
        intended_s=intended_s,
        started_s=intended_s if started_s is None else started_s,
        ended_s=times_s[-1] if ended_s is None else ended_s,
        event_times_s=array("d", times_s),
        prompt_tokens=None,
        output_tokens=len(times_s) if output_tokens is None else output_tokens,
        output_tokens_counted_by="usage",
        finish_reason="length",
        failure=failure,
    )


def test_percentiles_of_one_to_a_hundred_milliseconds() -> None:
    d = Distribution.of_seconds(ms / 1e3 for ms in range(100, 0, -1))
    assert d.num_samples == 100
    assert (d.p50, d.p90, d.p99) == pytest.approx((50.5, 90.1, 99.01))
    assert (d.mean, d.max) == pytest.approx((50.5, 100.0))


def test_an_empty_sample_has_no_figures() -> None:
    assert Distribution.of_seconds([]) == Distribution(0, *(None,) * 7)


def test_figures_of_two_requests() -> None:
    summary = summarize([result([1.0, 1.1, 1.3]), result([2.0, 2.5], intended_s=1.0, ended_s=3.0)], None)
    assert summary.wall_s == 3.0
    assert summary.output_tokens_per_s == pytest.approx(5 / 3)
    assert summary.requests_per_s == pytest.approx(2 / 3)
    assert summary.ttft_ms.p50 == pytest.approx(1000.0)
    assert summary.itl_ms.num_samples == 3
    assert summary.itl_ms.p50 == pytest.approx(200.0)
    assert summary.tpot_ms.mean == pytest.approx((150.0 + 1000.0) / 2)
    assert summary.e2e_ms.max == pytest.approx(2000.0)
    assert summary.prompt_tokens == 4
    assert summary.goodput_per_s is None


def test_merged_tokens_lower_tpot_and_leave_itl_to_events() -> None:
    summary = summarize([result([1.0, 2.0], output_tokens=5)], None)
    assert summary.itl_ms.p50 == pytest.approx(1000.0)
    assert summary.tpot_ms.p50 == pytest.approx(250.0)
    assert summary.tokens_per_event == 2.5


def test_failed_requests_count_only_as_failures() -> None:
    short = Failure(FailureKind.SHORT, "first")
    refused = Failure(FailureKind.HTTP, "busy", 429)
    results = [
        result([1.0], failure=short),
        result([1.0], failure=Failure(FailureKind.SHORT, "second")),
        result([1.0], failure=refused),
        result([2.0, 4.0]),
    ]
    summary = summarize(results, Slo())
    assert (summary.num_served, summary.num_failed, summary.output_tokens) == (1, 3, 2)
    assert {label: (f.count, f.example) for label, f in summary.failures.items()} == {
        "short": (2, "first"),
        "http_429": (1, "busy"),
    }
    assert summary.goodput_per_s == pytest.approx(1 / 4)


def test_a_run_without_requests_is_all_zeros() -> None:
    summary = summarize([], None)
    assert (summary.num_requests, summary.output_tokens_per_s, summary.tokens_per_event) == (0, 0.0, None)


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(ttft_ms=500.0), True),
        (Slo(ttft_ms=499.0), False),
        (Slo(itl_ms=298.1), True),
        (Slo(itl_ms=290.0), False),
        (Slo(tpot_ms=201.0), True),
        (Slo(tpot_ms=199.0), False),
        (Slo(e2e_ms=901.0), True),
        (Slo(ttft_ms=500.0, e2e_ms=899.0), False),
    ],
)
def test_goodput_wants_every_target_met(slo: Slo, is_met: bool) -> None:
    assert meets_slo(result([0.5, 0.6, 0.9]), slo) is is_met


def test_a_single_token_has_no_gaps_to_judge() -> None:
    assert meets_slo(result([0.5]), Slo(ttft_ms=500.0, itl_ms=0.1, tpot_ms=0.1))


def test_a_first_token_that_never_came_misses_its_target() -> None:
    assert not meets_slo(result([], ended_s=0.1), Slo(ttft_ms=500.0))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    num_hits = 0
    for trial in range(30):
        samples = RequestSamples(rng.exponential(1.0, 100), range(100), 100)
        interval = samples.intervals((50.0,), seed=trial)[0]
        num_hits += interval.low <= np.log(2.0) <= interval.high
    assert 26 <= num_hits <= 30  # 95 % of 30 are 28 or 29


def test_gaps_of_one_request_count_as_one_draw() -> None:
    rng = np.random.default_rng(6)
    levels = rng.normal(10.0, 2.0, 40)
    owners = np.repeat(np.arange(40), 50)
    together = RequestSamples(levels[owners], owners.tolist(), 40).intervals((50.0,))[0]
    apart = RequestSamples(levels[owners], range(2000), 2000).intervals((50.0,))[0]
    assert together.high - together.low > 3 * (apart.high - apart.low)


def test_percentiles_are_those_of_the_sample() -> None:
    samples = RequestSamples([3.0, 1.0, 2.0], [0, 1, 2], 3)
    assert samples.percentile(50.0) == 2.0
    low, high = samples.intervals((50.0,))[0]
    assert 1.0 <= low <= high <= 3.0
