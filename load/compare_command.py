"""The commands `sluice load compare A.json B.json` and `sluice load ab`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sluice.load import report
from sluice.load.compare import LEAST_ROUNDS, Comparison, compare_reports, compare_rounds, read_report
from sluice.load.config import LoadConfigError
from sluice.load.options import parser
from sluice.load.run import Run, RunError, run_blocking
from sluice.load.settings import make_config
from sluice.load.values import at_least

_PAUSE_S = 2.0
"""Idle time before each run of a pair, so that no server still works off the last one."""
_FAILED, _USAGE_ERROR, _INTERRUPTED = 1, 2, 130

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
    try:
        a, b = read_report(arguments.a), read_report(arguments.b)
    except LoadConfigError as error:
        sys.stderr.write(f"sluice load compare: {error}\n")
        return _USAGE_ERROR
    console = report.report_console()
    for name, each in (("A", a), ("B", b)):
        console.print(f"{name}  {each.title}: {each.num_requests} requests, {each.num_failed} failed", markup=False)
    _print(compare_reports(a, b), console)
    return 0


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
    try:
        for number in range(arguments.rounds):
            if not arguments.quiet:
                sys.stderr.write(f"round {number + 1} of {arguments.rounds}\n")
            rounds.append(_run_round(arguments, number))
    except (LoadConfigError, RunError) as error:
        sys.stderr.write(f"sluice load ab: {error}\n")
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    console = report.report_console()
    console.print(f"A  {report.title_of(rounds[0][0])}\nB  {report.title_of(rounds[0][1])}", markup=False)
    _print(compare_rounds(rounds), console)
    num_failed = [sum(pair[place].summary.num_failed for pair in rounds) for place in (0, 1)]
    console.print(f"failed requests: {num_failed[0]} of A, {num_failed[1]} of B")
    return _FAILED if any(num_failed) and not arguments.allow_failures else 0


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
