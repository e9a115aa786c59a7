import numpy as np

from sluice.load.intervals import RequestSamples


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
