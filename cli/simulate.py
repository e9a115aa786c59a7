"""The command `sluice simulate`: a fleet that serves a trace in simulated time, and its report."""

import argparse
import csv
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sluice.cli.errors import CommandError, reports_errors
from sluice.engine.config import SchedulerPolicy
from sluice.engine.fleet.router import RouterSettings, RoutingPolicy
from sluice.engine.simulation.fleet import FleetConfig, FleetRun, Floats, simulate
from sluice.engine.simulation.profile import ReplicaProfile, bundled_profile, read_profile
from sluice.engine.simulation.scaling import fit_slowdown, measured_tpot_s, scale_costs
from sluice.engine.simulation.summary import FleetSummary, LatencyTargets, find_replicas, summarize
from sluice.engine.simulation.traces import FORMATS, TracedRequest, read_trace, scaled
from sluice.errors import SluiceError, invalid_argument
from sluice.gateway.options.option import USAGE_ERROR, OneLineParser, argument_type, integer, number
from sluice.plots import Line, bar_plot, html_table, line_plot, render_report

_OVERVIEW = """\
Let a fleet of replicas serve a trace of requests in simulated time: hours of traffic in minutes, without a GPU or a
model. Scheduler, KV cache and router are those that serve; only the time of a step comes from a cost model.
"""
_EPILOG = """\
traces (told by the first line, or --format):
  sluice    JSON lines {"at_s": 0.25, "prompt_tokens": 900, "output_tokens": 120, "prefix": [["system", 600]]}.
            prefix names what the prompt begins with, in tokens: requests that begin with equal pieces share them.
            Optional: max_tokens (what the client asks for, if more than output_tokens), session, tenant, priority
  mooncake  JSON lines {"timestamp": 250, "input_length": 900, "output_length": 120, "hash_ids": [0, 17]}; ms, and
            one id for each 512 tokens
  burstgpt  CSV with the columns Timestamp (s), Request tokens, Response tokens; nothing is shared
  load      what `sluice load --json FILE` wrote: a measured run again, on other fleets

costs (--costs): JSON with the limits of a replica and what its steps cost, which `sluice load --calibrate FILE`
measures against a running server. Without it: the bundled model on two CPU cores. On a CPU, steps take longer once many
clients keep the gateway busy too: --measured scales the costs to a run under load. Replicas on the same cores slow each
other down: --measured-together tells by how much.

examples:
  sluice simulate trace.jsonl --replicas 8
  sluice simulate trace.jsonl --replicas 8 --router round-robin       # beside another router
  sluice simulate trace.jsonl --speed 2 --ttft-target 500 --itl-target 50 --html report.html
  sluice simulate trace.jsonl --ttft-target 500 --find-replicas 64    # how many are enough
  sluice load --calibrate my-gpu.json && sluice simulate trace.jsonl --costs my-gpu.json
  sluice load --request-rate 20 --json run.json && sluice simulate trace.jsonl --measured run.json

measurements: TTFT, ITL and E2E as `sluice load` defines them, from a request's arrival. goodput: requests a second that
met every target; the ITL target holds for the 99th percentile of a request's own gaps. hit rate: part of the
prompts' tokens that a cache had, beside that of one cache which forgets nothing.

Exit codes: 0 when done, 1 where --find-replicas finds no number, 2 for a bad option or trace.
"""


@reports_errors("sluice simulate")
def command(argv: list[str]) -> int:
    """Simulate a fleet on a trace: latencies, goodput, cache hits, how many replicas are enough."""
    arguments = _parser().parse_args(argv)
    try:
        _check(arguments)
        config, targets = _config(arguments), _targets(arguments)
        requests = _requests(arguments)
    except SluiceError as error:
        raise CommandError(error.message, USAGE_ERROR) from None
    console = Console(soft_wrap=True)
    started = time.perf_counter()
    run = _run(arguments, requests, config, targets)
    summary = summarize(run, targets)
    print_summary(summary, time.perf_counter() - started, console)
    try:
        _write(arguments, run, summary, argv)
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be written: {error.strerror}") from None
    return 0


def _run(
    arguments: argparse.Namespace, requests: list[TracedRequest], config: FleetConfig, targets: LatencyTargets
) -> FleetRun:
    if arguments.find_replicas is None:
        with _progress(len(requests), is_quiet=arguments.quiet) as report:
            return simulate(requests, config, report, concurrency=arguments.concurrency)

    def show(summary: FleetSummary) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{summary.num_replicas} replicas: {summary.share_in_target:.1%} within the targets\n")

    return find_replicas(requests, config, targets, arguments.share / 100, arguments.find_replicas, show)


@contextmanager
def _progress(num_requests: int, *, is_quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that takes the number of ended requests, for a bar on a terminal."""
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f} requests"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as display:
        bar = display.add_task("", total=num_requests)
        yield lambda num_ended: display.update(bar, completed=num_ended)


def _write(arguments: argparse.Namespace, run: FleetRun, summary: FleetSummary, argv: list[str]) -> None:
    if arguments.json is not None:
        arguments.json.write_bytes(to_json(run, summary, argv))
    if arguments.csv is not None:
        write_csv(run, arguments.csv)
    if arguments.html is not None:
        arguments.html.write_text(_render_page(run, summary, argv), encoding="utf-8")


# -- options


def _config(arguments: argparse.Namespace) -> FleetConfig:
    profile = bundled_profile() if arguments.costs is None else read_profile(arguments.costs)
    changed = {
        name: value
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        if (value := getattr(arguments, name)) is not None
    }
    if "max_num_batched_tokens" in changed:
        changed["chooses_chunk"] = False
    try:
        profile = ReplicaProfile(**{**_fields(profile), **changed})
    except ValueError as error:
        raise invalid_argument(str(error)) from None
    router = RouterSettings(policy=RoutingPolicy(arguments.router), seed=arguments.seed)
    if arguments.measured is not None:
        profile = _scaled_profile(arguments, FleetConfig(profile, arguments.measured_replicas, router))
    if arguments.measured_together is not None:
        profile = _slowed_profile(arguments, FleetConfig(profile, arguments.together_replicas, router))
    return FleetConfig(profile, arguments.replicas, router, SchedulerPolicy(arguments.policy))


def _scaled_profile(arguments: argparse.Namespace, fleet: FleetConfig) -> ReplicaProfile:
    tpot_s = measured_tpot_s(arguments.measured)
    factor, profile = scale_costs(read_trace(arguments.measured, "load"), fleet, tpot_s)
    if not arguments.quiet:
        sys.stderr.write(
            f"costs times {factor:.2f}, by which the measured run has its mean TPOT of {1e3 * tpot_s:.2f} ms\n"
        )
    return profile


def _slowed_profile(arguments: argparse.Namespace, fleet: FleetConfig) -> ReplicaProfile:
    run = arguments.measured_together
    profile = fit_slowdown(read_trace(run, "load"), fleet, measured_tpot_s(run))
    if not arguments.quiet:
        sys.stderr.write(f"each replica in a step makes a step of another {100 * profile.slowdown:.0f} % longer\n")
    return profile


def _fields(profile: ReplicaProfile) -> dict[str, object]:
    return {name: getattr(profile, name) for name in profile.__struct_fields__}


def _requests(arguments: argparse.Namespace) -> list[TracedRequest]:
    requests = read_trace(arguments.trace, arguments.format)
    if arguments.num_requests is not None:
        requests = requests[: arguments.num_requests]
    return scaled(requests, arguments.speed)


def _targets(arguments: argparse.Namespace) -> LatencyTargets:
    ttft_ms, itl_ms = arguments.ttft_target, arguments.itl_target
    return LatencyTargets(None if ttft_ms is None else ttft_ms / 1e3, None if itl_ms is None else itl_ms / 1e3)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.find_replicas is not None and not _targets(arguments).is_given:
        raise invalid_argument("--find-replicas needs --ttft-target or --itl-target: what to find the number for")
    if arguments.concurrency is not None and (arguments.speed != 1.0 or arguments.find_replicas is not None):
        raise invalid_argument(
            "--concurrency sends requests when others have ended: leave out --speed and --find-replicas"
        )
    if arguments.find_replicas is not None and arguments.replicas != _REPLICAS:
        raise invalid_argument("--replicas and --find-replicas contradict each other: give one of them")


_REPLICAS = 8


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="sluice simulate", description=_OVERVIEW, epilog=_EPILOG)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the file with the requests")
    parser.add_argument("--format", choices=["auto", *FORMATS], default="auto", help="the trace's format (%(default)s)")
    count, positive = argument_type(integer(1)), argument_type(number(0, is_above=True))
    trace = parser.add_argument_group("trace")
    trace.add_argument("--speed", type=positive, default=1.0, metavar="X", help="let requests come X times as fast")
    trace.add_argument("--num-requests", type=count, metavar="N", help="take the first N requests alone")
    trace.add_argument(
        "--concurrency", type=count, metavar="N", help="send N requests at a time, each when one has ended, not by time"
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=count, default=_REPLICAS, metavar="N", help="replicas (%(default)s)")
    fleet.add_argument(
        "--router",
        choices=[policy.value for policy in RoutingPolicy],
        default=RoutingPolicy.PREFIX.value,
        help="how replicas are chosen (%(default)s)",
    )
    fleet.add_argument(
        "--policy",
        choices=[policy.value for policy in SchedulerPolicy],
        default=SchedulerPolicy.GUARANTEED_NO_EVICT.value,
        help="scheduler policy of each replica (%(default)s)",
    )
    fleet.add_argument(
        "--seed", type=argument_type(integer(0)), default=0, metavar="N", help="turns equal replicas round (0)"
    )
    replica = parser.add_argument_group("replica", "in place of what --costs says")
    replica.add_argument("--costs", type=Path, metavar="FILE", help="limits and costs of a replica, as JSON")
    replica.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a run against such replicas that `sluice load --json` wrote: all costs are scaled by the factor by which "
        "it has its mean TPOT",
    )
    replica.add_argument(
        "--measured-replicas", type=count, default=1, metavar="N", help="replicas that served --measured (%(default)s)"
    )
    replica.add_argument(
        "--measured-together",
        type=Path,
        metavar="FILE",
        help="a run against several replicas that share this machine's cores, as `sluice load --json` wrote it: a step "
        "takes longer while others are in one, by as much as gives its mean TPOT. --measured is of one replica then",
    )
    replica.add_argument(
        "--together-replicas",
        type=argument_type(integer(2)),
        default=2,
        metavar="N",
        help="replicas that served --measured-together (%(default)s)",
    )
    replica.add_argument("--num-blocks", type=count, metavar="N", help="KV cache blocks")
    replica.add_argument("--block-size", type=count, metavar="N", help="tokens of a block")
    replica.add_argument("--max-num-seqs", type=count, metavar="N", help="most sequences in a step")
    replica.add_argument("--max-num-batched-tokens", type=count, metavar="N", help="most tokens in a step")
    replica.add_argument("--max-model-len", type=count, metavar="N", help="most tokens of a request and its answer")
    targets = parser.add_argument_group("targets")
    targets.add_argument("--ttft-target", type=positive, metavar="MS", help="most milliseconds to the first token")
    targets.add_argument(
        "--itl-target", type=positive, metavar="MS", help="most milliseconds of the 99th percentile of a request's gaps"
    )
    targets.add_argument(
        "--find-replicas", type=count, metavar="MOST", help="find the least number of replicas that meets the targets"
    )
    targets.add_argument(
        "--share",
        type=argument_type(number(0, 100, is_above=True)),
        default=99.0,
        metavar="PERCENT",
        help="part of all requests that must meet them (99)",
    )
    report = parser.add_argument_group("report")
    report.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures as JSON")
    report.add_argument("--csv", type=_new_file, metavar="FILE", help="write a row for each request")
    report.add_argument("--html", type=_new_file, metavar="FILE", help="write a page with plots, in one file")
    report.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


@argument_type
def _new_file(text: str) -> Path:
    """Check the path now rather than after a long run."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise ValueError("a file in a folder that exists")
    return Path(text)


COLUMNS = ("number", "at_s", "replica", "prompt_tokens", "cached_tokens", "output_tokens", "wait_s", "ttft_s", "e2e_s")


def print_summary(summary: FleetSummary, took_s: float, console: Console) -> None:
    """Print the figures, and how long the simulation took."""
    s = summary
    title = f"{s.num_replicas} replicas, router {s.router}, policy {s.policy}"
    console.print(title, style="bold", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    names = ("p50", "p90", "p95", "p99", "mean", "max")
    for name in names:
        table.add_column(name, justify="right")
    for label, figures in (("TTFT", s.ttft_s), ("ITL", s.itl_s), ("E2E", s.e2e_s), ("wait", s.wait_s)):
        values = (getattr(figures, name) for name in names)
        table.add_row(label, *("-" if value is None else f"{value * 1e3:,.1f}" for value in values))
    console.print(table)
    lines = [
        f"output    {s.output_tokens_per_s:,.0f} tokens/s, {s.requests_per_s:,.2f} requests/s",
        f"cache     {s.hit_rate:.1%} of the prompts' tokens; one cache that forgets nothing: {s.infinite_hit_rate:.1%}",
        f"busy      {s.utilization:.1%} of the time",
        f"requests  {s.num_requests - s.num_rejected:,} served in {s.seconds:,.1f} s ({took_s:,.1f} s to simulate)"
        + (f", {s.num_rejected:,} can never fit" if s.num_rejected else ""),
    ]
    if s.goodput_per_s is not None:
        lines.append(f"goodput   {s.goodput_per_s:,.2f} requests/s, {s.share_in_target:.2%} of all")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def to_json(run: FleetRun, summary: FleetSummary, argv: Sequence[str]) -> bytes:
    """Encode the figures, the profile of the replicas and what each did."""
    document = {
        "tool": "sluice simulate",
        "command": shlex.join(["sluice", "simulate", *argv]),
        "profile": run.config.profile,
        "summary": summary,
        "replicas": [each._asdict() for each in run.totals],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def write_csv(run: FleetRun, path: Path) -> None:
    """Write a row for each request of the trace. Those of rejected requests end with the replica, -1."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, "itl_p99_s"))
        for number, request in enumerate(run.requests):
            replica = int(run.replica[number])
            row = [number, f"{request.at_s:.6f}", replica, request.num_prompt]
            if replica >= 0:
                times = (run.wait_s[number], run.ttft_s[number], run.e2e_s[number], run.itl_p99_s[number])
                row += [int(run.num_cached[number]), request.num_output, *(f"{value:.6f}" for value in times)]
            writer.writerow(row)


# -- the page

_NUM_POINTS = 120


def _render_page(run: FleetRun, summary: FleetSummary, argv: Sequence[str]) -> str:
    """Return the page."""
    s, title = summary, f"{summary.num_replicas} replicas, router {summary.router}"
    command = shlex.join(["sluice", "simulate", *argv])
    model = " on ".join(part for part in (run.config.profile.name, run.config.profile.machine) if part)
    rows = [
        ("output", f"{s.output_tokens_per_s:,.0f} tokens/s"),
        ("requests", f"{s.requests_per_s:,.2f} a second"),
        ("prompt tokens from caches", f"{s.hit_rate:.1%}"),
        ("of one infinite cache", f"{s.infinite_hit_rate:.1%}"),
        ("busy", f"{s.utilization:.1%}"),
    ]
    if s.goodput_per_s is not None:
        rows.append(("goodput", f"{s.goodput_per_s:,.2f} requests/s ({s.share_in_target:.2%})"))
    if s.num_rejected:
        rows.append(("can never fit", f"{s.num_rejected:,} requests"))
    return render_report(title, (command, model), (_latency_table(s), html_table(rows)), _plots(run))


def _latency_table(summary: FleetSummary) -> str:
    names = ("p50", "p90", "p95", "p99", "mean", "max")
    rows = []
    for label, figures in (("TTFT", summary.ttft_s), ("ITL", summary.itl_s), ("E2E", summary.e2e_s)):
        values = (getattr(figures, name) for name in names)
        rows.append((label, *("-" if value is None else f"{value * 1e3:,.1f}" for value in values)))
    return html_table(rows, ("ms", *names))


def _plots(run: FleetRun) -> list[str]:
    served = run.replica >= 0
    at_s = np.array([request.at_s for request in run.requests])[served]
    ttft_ms, e2e_ms = run.ttft_s[served] * 1e3, run.e2e_s[served] * 1e3
    if not at_s.size:
        return ["<p>No request was served.</p>"]

    def line(label: str, color: str, x: Floats, y: Floats) -> Line:
        return Line(label, color, x.tolist(), y.tolist())

    parts = np.linspace(0.0, 1.0, _NUM_POINTS)
    quantiles = [
        line("TTFT", "#4477aa", parts * 100, np.quantile(ttft_ms, parts)),
        line("E2E", "#cc6677", parts * 100, np.quantile(e2e_ms, parts)),
    ]
    edges = np.linspace(0.0, max(run.end_s, 1e-9), _NUM_POINTS + 1)
    width_s = edges[1] - edges[0]
    middle = (edges[1:] + edges[:-1]) / 2
    starts, ends = at_s, at_s + run.e2e_s[served]
    came, gone = np.histogram(starts, edges)[0], np.histogram(ends, edges)[0]
    rates = [
        line("come", "#4477aa", middle, came / width_s),
        line("end", "#cc6677", middle, gone / width_s),
    ]
    in_flight = [line("in flight", "#4477aa", middle, np.cumsum(came - gone).astype(float))]
    slow = [line("TTFT p99", "#4477aa", middle, _p99_of_bins(starts, ttft_ms, edges))]
    return [
        line_plot("Latency in ms by percentile", quantiles, "%"),
        line_plot("Requests a second", rates, "s"),
        line_plot("Requests in flight", in_flight, "s"),
        line_plot("99th percentile of TTFT in ms, by time of arrival", slow, "s"),
        bar_plot("Requests of each replica", [each.num_requests for each in run.totals]),
        bar_plot("Seconds in which each replica was busy", [each.busy_s for each in run.totals]),
    ]


def _p99_of_bins(at_s: Floats, values: Floats, edges: Floats) -> Floats:
    """Return the 99th percentile of the values in each bin, 0 for an empty one."""
    place = np.digitize(at_s, edges) - 1
    order = np.argsort(place, kind="stable")
    sizes = np.bincount(np.clip(place, 0, len(edges) - 2), minlength=len(edges) - 1)
    pieces = np.split(values[order], np.cumsum(sizes)[:-1])
    return np.array([np.percentile(piece, 99) if piece.size else 0.0 for piece in pieces])
