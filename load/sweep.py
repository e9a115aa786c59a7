"""`sluice load sweep`: one run for each of several loads, and how latency and throughput depend on the load."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from sluice.load import report
from sluice.load.options import parser
from sluice.load.run import FAILED, INTERRUPTED, Run, reports_errors, run_blocking
from sluice.load.settings import make_config
from sluice.load.values import at_least
from sluice.plots import Line, html_table, line_plot, render_report

_PAUSE_S = 1.0
"""Idle time before each run, so that the server has ended what the last one left."""
_SEED_STEP = 1_000_003
_BLUE, _RED, _GREEN = "#4477aa", "#cc6677", "#228833"

_SWEEP = """\
Measure a server at several loads, from the lowest to the highest.

All other options are those of `sluice load` and hold for every run. Each run has requests of its own, so that no cache
of prefixes knows them. The report has latency against load, and tokens/s of a user against tokens/s of a GPU: of each
load whether another one is better in both (the Pareto front).
"""
_EPILOG = """\
examples:
  sluice load sweep --concurrency 1,2,4,8,16,32 --num-requests 64 --html sweep.html
  sluice load sweep --request-rate 1,2,4,8 --duration 60 --slo ttft=500 --json sweep.json --num-gpus 8

Exit status: 0 all served, 1 some requests failed, 2 a run could not begin, 130 interrupted.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A load and its run."""

    load: float
    run: Run
    num_gpus: int

    @property
    def tokens_per_s_per_user(self) -> float | None:
        """Output tokens a second of a stream after its first token: the inverse of the median TPOT."""
        tpot_ms = self.run.summary.tpot_ms.p50
        return 1e3 / tpot_ms if tpot_ms else None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.run.summary.output_tokens_per_s / self.num_gpus


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point equals or beats in both, while it is better in one."""
    known = [(point, point.tokens_per_s_per_user) for point in points]
    return [
        point
        for point, user in known
        if user is not None
        and not any(
            other_user is not None
            and other_user >= user
            and other.tokens_per_s_per_gpu >= point.tokens_per_s_per_gpu
            and (other_user, other.tokens_per_s_per_gpu) != (user, point.tokens_per_s_per_gpu)
            for other, other_user in known
        )
    ]


@reports_errors("sluice load sweep")
def sweep(argv: list[str]) -> int:
    """Run all loads, print a table, and write the reports."""
    options = parser("sluice load sweep", _SWEEP, _EPILOG, is_sweep=True)
    options.add_argument(
        "--num-gpus", type=at_least(1), metavar="N", help="GPUs of the server; default: what its metrics say, else 1"
    )
    arguments = options.parse_args(argv)
    points: list[Point] = []
    was_interrupted = False
    try:
        for load in arguments.concurrency or arguments.request_rate:
            run = _run(arguments, load, len(points))
            points.append(Point(load, run, _num_gpus(arguments, run)))
            was_interrupted = run.was_interrupted
            if was_interrupted:
                break
    except KeyboardInterrupt:
        was_interrupted = True
    if points:
        _report(points, arguments, argv)
    if was_interrupted:
        return INTERRUPTED
    is_failed = any(point.run.summary.num_failed for point in points) and not arguments.allow_failures
    return FAILED if is_failed else 0


def _run(arguments: argparse.Namespace, load: float, number: int) -> Run:
    given = copy(arguments)
    given.calibrate = given.csv = None
    given.seed = arguments.seed + _SEED_STEP * number
    if arguments.concurrency:
        given.concurrency = int(load)
        given.processes = min(arguments.processes, int(load))
    else:
        given.request_rate = load
    if number:
        asyncio.run(asyncio.sleep(_PAUSE_S))
    if not arguments.quiet:
        sys.stderr.write(f"{_unit(arguments)} {load:g}\n")
    view = None if arguments.quiet else partial(report.show_progress, console=Console(stderr=True, soft_wrap=True))
    return run_blocking(make_config(given), view)


def _num_gpus(arguments: argparse.Namespace, run: Run) -> int:
    server = run.watched.server
    said = server.num_gpus if server is not None else None
    return arguments.num_gpus or said or 1


def _unit(arguments: argparse.Namespace) -> str:
    return "concurrency" if arguments.concurrency else "requests/s"


def _report(points: list[Point], arguments: argparse.Namespace, argv: list[str]) -> None:
    console = report.report_console()
    console.print(f"\n{_title(points, arguments)}", style="bold", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    front = pareto_front(points)
    header, *rows = _rows(points, front, _unit(arguments))
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for point in points:
        for label, failure in point.run.summary.failures.items():
            line = f"  {_unit(arguments)} {point.load:g}: {label}: {failure.count}, first: {failure.example[:160]}"
            console.print(line, markup=False)
    if arguments.json is not None:
        arguments.json.write_bytes(_to_json(points, front, arguments, argv))
    if arguments.html is not None:
        arguments.html.write_text(_page(points, front, arguments, argv))


def _title(points: Sequence[Point], arguments: argparse.Namespace) -> str:
    run = points[0].run
    return f"{run.model} at {run.config.target.url}, {run.config.target.api}, by {_unit(arguments)}"


def _rows(points: Sequence[Point], front: Sequence[Point], unit: str) -> Iterator[list[str]]:
    yield [
        unit,
        "requests/s",
        "tokens/s",
        "tokens/s/user",
        "tokens/s/GPU",
        "TTFT p50",
        "TTFT p99",
        "ITL p50",
        "ITL p99",
        "E2E p50",
        "E2E p99",
        "goodput",
        "failed",
        "front",
    ]
    for point in points:
        s = point.run.summary
        figures = (s.ttft_ms.p50, s.ttft_ms.p99, s.itl_ms.p50, s.itl_ms.p99, s.e2e_ms.p50, s.e2e_ms.p99)
        yield [
            f"{point.load:g}",
            f"{s.requests_per_s:,.2f}",
            f"{s.output_tokens_per_s:,.0f}",
            _number(point.tokens_per_s_per_user),
            f"{point.tokens_per_s_per_gpu:,.0f}",
            *map(_number, figures),
            _number(s.goodput_per_s),
            str(s.num_failed),
            "*" if point in front else "",
        ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _to_json(points: list[Point], front: list[Point], arguments: argparse.Namespace, argv: list[str]) -> bytes:
    rows = [
        {
            "load": point.load,
            "num_gpus": point.num_gpus,
            "tokens_per_s_per_user": point.tokens_per_s_per_user,
            "tokens_per_s_per_gpu": point.tokens_per_s_per_gpu,
            "is_on_front": point in front,
            "report": report.document_of(point.run, ["sweep", *argv]),
        }
        for point in points
    ]
    return report.encode_document({"tool": "sluice load sweep", "unit": _unit(arguments), "points": rows})


def _page(points: list[Point], front: list[Point], arguments: argparse.Namespace, argv: list[str]) -> str:
    command = shlex.join(["sluice", "load", "sweep", *report.shown_command(argv)])
    machine = ", ".join(f"{name} {value}" for name, value in points[0].run.machine.items())
    header, *rows = _rows(points, front, _unit(arguments))
    table = html_table(rows, header)
    return render_report(
        _title(points, arguments), (command, machine), (table,), _plots(points, front, _unit(arguments))
    )


def _plots(points: Sequence[Point], front: Sequence[Point], unit: str) -> list[str]:
    latencies: dict[str, tuple[Callable[[Run], float | None], Callable[[Run], float | None]]] = {
        "TTFT": (lambda run: run.summary.ttft_ms.p50, lambda run: run.summary.ttft_ms.p99),
        "ITL": (lambda run: run.summary.itl_ms.p50, lambda run: run.summary.itl_ms.p99),
        "E2E": (lambda run: run.summary.e2e_ms.p50, lambda run: run.summary.e2e_ms.p99),
    }
    plots = []
    for name, (median, tail) in latencies.items():
        lines = [
            _line(label, color, points, measure)
            for label, color, measure in (("p50", _BLUE, median), ("p99", _RED, tail))
        ]
        plots += [line_plot(f"{name} in ms against the load", known, unit)] if (known := _known(lines)) else []
    tokens = _line("tokens/s", _GREEN, points, lambda run: run.summary.output_tokens_per_s)
    plots.append(line_plot("Output tokens a second against the load", [tokens], unit))
    pareto = [_pareto_line("all", _BLUE, points), _pareto_line("front", _GREEN, front)._replace(names=())]
    if known := _known(pareto):
        plots.append(line_plot("Tokens/s/GPU against tokens/s/user (Pareto)", known, "tokens/s/user"))
    return plots


def _known(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.x]


def _line(label: str, color: str, points: Sequence[Point], measure: Callable[[Run], float | None]) -> Line:
    known = [(point.load, value) for point in points if (value := measure(point.run)) is not None]
    return Line(label, color, [x for x, _ in known], [y for _, y in known], [f"{y:,.4g}" for _, y in known])


def _pareto_line(label: str, color: str, points: Sequence[Point]) -> Line:
    known = sorted(
        (user, point.tokens_per_s_per_gpu, f"{point.load:g}")
        for point in points
        if (user := point.tokens_per_s_per_user) is not None
    )
    return Line(label, color, [x for x, _, _ in known], [y for _, y, _ in known], [name for _, _, name in known])
