"""`sluice load compare` and `sluice load ab`: what differs between two servers beyond noise.

Two reports are compared by drawing their requests anew: a difference counts where the ratio of the two figures stays on
one side of 1 in 95 % of the draws. Machines change their speed within minutes, which no drawing of requests sees. So
`ab` runs both in turns, and compares the runs of each round with each other.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sluice.load.config import LoadConfigError
from sluice.load.intervals import ConfidenceInterval, RequestSamples, bounds
from sluice.load.run import Run

PERCENTS = (50.0, 99.0)
_LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s"}
_SEEDS = 11, 13
"""The seeds of the draws of A's and B's requests, which are independent of each other."""
_DRAWN_ROUNDS = 10_000
LEAST_ROUNDS = 5
"""Fewer rounds cannot tell a difference from luck: all of four on one side happens once in eight."""


_ROUND_FIGURES: tuple[tuple[str, Callable[[Run], float | None], bool], ...] = (
    ("TTFT p50, ms", lambda run: run.summary.ttft_ms.p50, False),
    ("TTFT p99, ms", lambda run: run.summary.ttft_ms.p99, False),
    ("ITL p50, ms", lambda run: run.summary.itl_ms.p50, False),
    ("ITL p99, ms", lambda run: run.summary.itl_ms.p99, False),
    ("E2E p50, ms", lambda run: run.summary.e2e_ms.p50, False),
    ("E2E p99, ms", lambda run: run.summary.e2e_ms.p99, False),
    ("output, tokens/s", lambda run: run.summary.output_tokens_per_s, True),
    ("requests/s", lambda run: run.summary.requests_per_s, True),
)


class Comparison(NamedTuple):
    """A figure of both, B's as a multiple of A's, and the interval of that multiple."""

    name: str
    a: float
    b: float
    ratio: float
    interval: ConfidenceInterval
    is_rate: bool
    """More is better."""

    @property
    def verdict(self) -> str:
        """Say in words whether B differs from A."""
        if self.interval.low <= 1.0 <= self.interval.high:
            return "no difference"
        is_better = (self.ratio > 1.0) == self.is_rate
        return "B is better" if is_better else "B is worse"


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run in a report of `sluice load --json`."""

    title: str
    num_requests: int
    num_failed: int
    samples: dict[str, RequestSamples]


def read_report(path: Path) -> Report:
    """Read a file that `sluice load --json` wrote. Raises LoadConfigError."""
    try:
        document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        if document["tool"] != "sluice load":
            raise KeyError("tool")
        served = [row for row in document["requests"] if row["failure"] is None]
        samples = {}
        for name, column in _LATENCIES.items():
            pairs = [(row[column] * 1e3, number) for number, row in enumerate(served) if row[column] is not None]
            if pairs:
                values, owners = zip(*pairs, strict=True)
                samples[name] = RequestSamples(values, owners, len(served))
        num_failed = len(document["requests"]) - len(served)
        return Report(document["command"], len(document["requests"]), num_failed, samples)
    except OSError as error:
        raise LoadConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise LoadConfigError(f"{path}: not a report of `sluice load --json` ({error})") from None


def compare_reports(a: Report, b: Report) -> list[Comparison]:
    """Compare the latencies of two runs, in milliseconds."""
    found = []
    for name in _LATENCIES:
        if name not in a.samples or name not in b.samples:
            continue
        drawn = [each.samples[name].draw_percentiles(PERCENTS, seed) for each, seed in zip((a, b), _SEEDS, strict=True)]
        num_draws = min(map(len, drawn))
        for column, percent in enumerate(PERCENTS):
            of_a, of_b = (each.samples[name].percentile(percent) for each in (a, b))
            if not drawn[0][:, column].all():  # a latency of nothing, which no ratio can be taken to
                continue
            interval = bounds(drawn[1][:num_draws, column] / drawn[0][:num_draws, column])
            found.append(Comparison(f"{name} p{percent:g}, ms", of_a, of_b, of_b / of_a, interval, is_rate=False))
    return found


def compare_rounds(rounds: Sequence[tuple[Run, Run]]) -> list[Comparison]:
    """Compare the runs of each round with each other: medians over the rounds, and of their ratios."""
    figures = (
        (name, [(measure(a), measure(b)) for a, b in rounds], is_rate) for name, measure, is_rate in _ROUND_FIGURES
    )
    return [found for name, pairs, is_rate in figures if (found := compare_pairs(name, pairs, is_rate)) is not None]


def compare_pairs(name: str, pairs: Sequence[tuple[float | None, float | None]], is_rate: bool) -> Comparison | None:
    """Compare a figure that A and B have in each round; None where one lacks it or it is 0."""
    known = [(a, b) for a, b in pairs if a and b]
    if len(known) < len(pairs) or not known:
        return None
    logs = np.array([math.log(b / a) for a, b in known])
    drawn = np.random.default_rng(0).choice(logs, (_DRAWN_ROUNDS, len(logs))).mean(axis=1)
    low, high = bounds(drawn)
    return Comparison(
        name,
        statistics.median(a for a, _ in known),
        statistics.median(b for _, b in known),
        math.exp(float(logs.mean())),
        ConfidenceInterval(math.exp(low), math.exp(high)),
        is_rate,
    )
