import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.telemetry import DEFAULT_QUANTILES, MetricsSettings, Quantile, parse_metrics_settings
from sluice.gateway.telemetry.page import latency_options
from sluice.serving.latencies import LatencyOptions


def test_defaults_are_tritons() -> None:
    settings = parse_metrics_settings([])
    assert settings == MetricsSettings()
    assert (settings.has_counters, settings.has_summaries, settings.has_histograms) == (True, False, False)
    assert [each.label for each in DEFAULT_QUANTILES] == ["0.5", "0.9", "0.95", "0.99", "0.999"]
    assert latency_options(settings) == LatencyOptions()


def test_every_setting() -> None:
    settings = parse_metrics_settings(
        [
            "counter_latencies=false",
            "summary_latencies=true",
            "summary_quantiles=0.5:0.05,0.75:0.01",
            "histogram_latencies=false",
            "histogram_latencies=true",
            "triton_infer_aliases=true",
        ],
        interval_ms=500,
    )
    assert settings == MetricsSettings(
        interval_s=0.5,
        has_counters=False,
        has_summaries=True,
        has_histograms=True,
        has_triton_infer_aliases=True,
        quantiles=(Quantile(0.5, 0.05), Quantile(0.75, 0.01)),
    )
    assert latency_options(settings) == LatencyOptions(has_summaries=True, has_histograms=True)


def test_without_metrics_nothing_is_measured() -> None:
    settings = parse_metrics_settings(["summary_latencies=true"], is_allowed=False)
    assert (settings.allows_cpu, settings.allows_gpu) == (False, False)
    assert latency_options(settings) == LatencyOptions()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("summary_latencies", "must be KEY=VALUE"),
        ("summary_latencies=", "must be KEY=VALUE"),
        ("summary_latencies=1", "summary_latencies must be true or false, got '1'"),
        ("summaries=true", "has no setting 'summaries'; it has counter_latencies, summary_latencies"),
        ("summary_quantiles=0.5", "QUANTILE:ERROR"),
        ("summary_quantiles=0.5:x", "QUANTILE:ERROR"),
        ("summary_quantiles=0.5:0.05,", "QUANTILE:ERROR"),
        ("summary_quantiles=1.5:0.05", "got '1.5:0.05'"),
        ("summary_quantiles=nan:0.05", "got 'nan:0.05'"),
    ],
)
def test_what_makes_no_sense_is_named(text: str, words: str) -> None:
    with pytest.raises(SluiceError, match="--metrics-config") as caught:
        parse_metrics_settings([text])
    assert caught.value.code is ErrorCode.INVALID
    assert words in caught.value.message


def test_an_interval_takes_time() -> None:
    with pytest.raises(SluiceError, match="--metrics-interval-ms must be at least 1, got 0"):
        parse_metrics_settings([], interval_ms=0)
