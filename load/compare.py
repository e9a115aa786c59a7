"""The commands `sluice load compare A.json B.json` and `sluice load ab`: what differs between two servers beyond noise.

Two reports are compared by drawing their requests anew: a difference counts where the ratio of the two figures stays on
one side of 1 in 95 % of the draws. Machines change their speed within minutes, which no drawing of requests sees. So
`ab` runs both in turns, and compares the runs of each round with each other.
"""

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from sluice.load import report
from sluice.load.config import LoadConfigError
from sluice.load.options import parser
from sluice.load.run import FAILED, Run, reports_errors, run_blocking
from sluice.load.settings import make_config
from sluice.load.summary import ConfidenceInterval, RequestSamples, bounds
from sluice.load.values import at_least

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
        """The verdict in words: whether B differs from A."""
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


_PAUSE_S = 2.0
"""Idle time before each run of a pair, so that no server still works off the last one."""

_COMPARE = """\
Say what differs between two reports of `sluice load --json`, beyond noise.

A latency differs where the ratio of the two stays on one side of 1 in 95 % of 1,000 drawings of their requests. The
machine may have been faster during one of the runs: `sluice load ab` runs both in turns.
"""
_AB = """\
Measure two servers in turns, A B A B ..., and say what differs between them beyond noise.

All other options are those of `sluice load` and hold for both. Each round sends both the same requests, and each a
round's own, so that no cache of prefixes knows them. Ratios are taken within a round.
"""
_AB_EPILOG = """\
examples:
  sluice load ab --url-a http://127.0.0.1:8000 --url-b http://127.0.0.1:9000 --rounds 8
  sluice load ab --url-a http://a:8000 --url-b http://b:8000 --api chat --concurrency 16 --num-requests 64

Exit status: 0 all served, 1 some requests failed, 2 a run could not begin, 130 interrupted.
"""


@reports_errors("sluice load compare")
def compare(argv: list[str]) -> int:
    """Compare two reports. Returns 0, or 2 for a file that is no report."""
    options = argparse.ArgumentParser(
        "sluice load compare",
        description=_COMPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("a", type=Path, metavar="A.json")
    options.add_argument("b", type=Path, metavar="B.json")
    arguments = options.parse_args(argv)
    a, b = read_report(arguments.a), read_report(arguments.b)
    console = report.report_console()
    for name, each in (("A", a), ("B", b)):
        console.print(f"{name}  {each.title}: {each.num_requests} requests, {each.num_failed} failed", markup=False)
    _print(compare_reports(a, b), console)
    return 0


@reports_errors("sluice load ab")
def ab(argv: list[str]) -> int:
    """Measure two servers in turns and compare them."""
    options = parser("sluice load ab", _AB, _AB_EPILOG, is_alone=False)
    options.add_argument("--url-a", required=True, metavar="URL", help="the first server")
    options.add_argument("--url-b", required=True, metavar="URL", help="the second server")
    options.add_argument(
        "--rounds", type=at_least(LEAST_ROUNDS), default=LEAST_ROUNDS, metavar="N", help="pairs of runs (%(default)s)"
    )
    arguments = options.parse_args(argv)
    arguments.url = arguments.url_a
    rounds: list[tuple[Run, Run]] = []
    for number in range(arguments.rounds):
        if not arguments.quiet:
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}\n")
        rounds.append(_run_round(arguments, number))
    console = report.report_console()
    console.print(f"A  {report.title_of(rounds[0][0])}\nB  {report.title_of(rounds[0][1])}", markup=False)
    _print(compare_rounds(rounds), console)
    num_failed = [sum(pair[place].summary.num_failed for pair in rounds) for place in (0, 1)]
    console.print(f"failed requests: {num_failed[0]} of A, {num_failed[1]} of B")
    return FAILED if any(num_failed) and not arguments.allow_failures else 0


def _run_round(arguments: argparse.Namespace, number: int) -> tuple[Run, Run]:
    """Run both with this round's requests; every second round begins with B."""
    given = make_config(arguments)
    config = replace(given, workload=replace(given.workload, seed=given.workload.seed + number))
    urls = (arguments.url_a, arguments.url_b)
    runs: dict[int, Run] = {}
    view = None if arguments.quiet else partial(report.show_progress, console=Console(stderr=True, soft_wrap=True))
    for place in (0, 1) if number % 2 == 0 else (1, 0):
        asyncio.run(asyncio.sleep(_PAUSE_S))
        runs[place] = run_blocking(replace(config, target=replace(config.target, url=urls[place])), view)
        if runs[place].was_interrupted:
            raise KeyboardInterrupt
    return runs[0], runs[1]


def _print(comparisons: Sequence[Comparison], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("A", "B", "B / A", "95 % sure"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in comparisons:
        interval = f"{each.interval.low:.3f} to {each.interval.high:.3f}"
        table.add_row(each.name, f"{each.a:,.2f}", f"{each.b:,.2f}", f"{each.ratio:.3f}", interval, each.verdict)
    console.print(table)
