"""Counts the requests to one model in one protocol."""

from collections import Counter

from sluice.record.histogram import Histogram

TTFT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
ITL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    1_000_000,
)
MET, MISSED = "met", "missed"
HISTOGRAMS = {
    "time_to_first_token": TTFT_BUCKETS_S,
    "time_per_output_token": TPOT_BUCKETS_S,
    "request_duration": DURATION_BUCKETS_S,
    "inter_token_latency": ITL_BUCKETS_S,
    "decode_duration": DURATION_BUCKETS_S,
    "prompt_length": TOKEN_BUCKETS,
    "output_length": TOKEN_BUCKETS,
    "max_tokens": TOKEN_BUCKETS,
}
"""Attributes of a tally that are distributions, with their bounds."""


class RequestTally:
    """Open requests, outcomes, tokens and distributions, as plain numbers. Belongs to the event loop."""

    __slots__ = (
        *HISTOGRAMS,
        "aborted_tokens",
        "cached_tokens",
        "failed_durations",
        "finishes",
        "generation_tokens",
        "goodput",
        "misses",
        "num_open",
        "outcomes",
        "prompt_tokens",
    )

    time_to_first_token: Histogram
    time_per_output_token: Histogram
    request_duration: Histogram
    inter_token_latency: Histogram
    decode_duration: Histogram
    prompt_length: Histogram
    output_length: Histogram
    max_tokens: Histogram

    def __init__(self) -> None:
        self.num_open = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.aborted_tokens = 0
        """Tokens of the prompt that a cache had; tokens that were sent of answers that did not end by themselves."""
        self.outcomes: Counter[str] = Counter()
        self.finishes: Counter[str] = Counter()
        """Ended requests by outcome; by finish reason."""
        self.goodput: Counter[str] = Counter({MET: 0, MISSED: 0})
        self.misses: Counter[str] = Counter()
        """Requests by whether they met all targets, shown from 0 on as rates need it; by target that they missed."""
        self.failed_durations: dict[str, Histogram] = {}
        """Durations of the requests that did not end by themselves, by outcome; they are in `request_duration` too."""
        for name, bounds in HISTOGRAMS.items():
            setattr(self, name, Histogram(bounds))

    def add_failure(self, outcome: str, seconds: float) -> None:
        """Count a request that did not end by itself."""
        self.failed_durations.setdefault(outcome, Histogram(DURATION_BUCKETS_S)).add(seconds)

    def judge(self, missed: list[str]) -> None:
        """Count a request by the targets that it missed."""
        self.goodput[MISSED if missed else MET] += 1
        self.misses.update(missed)
