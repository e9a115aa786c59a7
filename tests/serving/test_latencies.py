import logging
from math import isnan

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.latencies import (
    FIRST_RESPONSE_BUCKETS_MS,
    FIRST_RESPONSE_FAMILY,
    SlidingSketch,
    read_first_response_buckets,
)
from tests.serving.batching.parts import config_of

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_one_percent(seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(mean=7, sigma=1.5, size=2000) + 1
    sketch = SlidingSketch()
    for number, value in enumerate(values):
        sketch.add(value, number * 1_000_000)
    wanted = [0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0]
    expected = np.quantile(values, wanted, method="inverted_cdf")
    assert sketch.quantiles(wanted, SECOND_NS) == pytest.approx(list(expected), rel=0.0101)


def test_less_than_a_microsecond_is_none() -> None:
    sketch = SlidingSketch()
    sketch.add(0.0, 0)
    sketch.add(0.9, 0)
    assert sketch.quantiles([0.5, 1.0], 0) == [0.0, 0.0]


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    sketch = SlidingSketch()
    sketch.add(1000.0, 0)
    sketch.add(10.0, 30 * SECOND_NS)
    assert sketch.quantiles([1.0], 59 * SECOND_NS) == [pytest.approx(1000, rel=0.01)]
    assert sketch.quantiles([1.0], 61 * SECOND_NS) == [pytest.approx(10, rel=0.01)]
    assert isnan(sketch.quantiles([1.0], 200 * SECOND_NS)[0])


def metrics(*controls: str) -> str:
    return "".join(f"model_metrics {{ metric_control {{ {control} }} }}" for control in controls)


IDENTIFIER = f'metric_identifier {{ family: "{FIRST_RESPONSE_FAMILY}" }}'


def test_buckets_are_tritons_unless_the_configuration_names_some() -> None:
    assert read_first_response_buckets(config_of()) == FIRST_RESPONSE_BUCKETS_MS == (100, 500, 2000, 5000)
    given = metrics(f"{IDENTIFIER} histogram_options {{ buckets: [ 1, 2, 4 ] }}")
    assert read_first_response_buckets(config_of(given)) == (1, 2, 4)


@pytest.mark.parametrize("buckets", ["2, 1", "1, 1", "1, inf", "nan"])
def test_buckets_that_are_none_are_refused(buckets: str) -> None:
    config = config_of(metrics(f"{IDENTIFIER} histogram_options {{ buckets: [ {buckets} ] }}"))
    with pytest.raises(SluiceError, match=f"buckets of '{FIRST_RESPONSE_FAMILY}' .* must be finite and asc") as caught:
        read_first_response_buckets(config)
    assert caught.value.code is ErrorCode.INVALID


def test_other_families_have_no_buckets_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    other = 'metric_identifier { family: "other" } histogram_options { buckets: [ 1 ] }'
    with caplog.at_level(logging.WARNING):
        assert read_first_response_buckets(config_of(metrics(other))) == FIRST_RESPONSE_BUCKETS_MS
    assert "metric family 'other' of model_metrics" in caplog.text
