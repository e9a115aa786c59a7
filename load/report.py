"""The progress of a run, and its report: a table for people, JSON for programs."""

import asyncio
import csv
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sluice.load.config import LoadConfig
from sluice.load.run import Run
from sluice.load.stream import LiveCounts, RequestResult
from sluice.load.summary import Summary, TurnFigures, latency_samples

SECRET_FLAGS = ("--api-key", "--header")
MAX_EXAMPLE_CHARS = 160
REDRAW_INTERVAL_S = 0.5
"""Seconds between two drawings, which cost CPU that a server on the same machine could use."""
LINE_INTERVAL_S = 5.0
BUSY_CLIENT = 0.8
"""The share of the run from which on the client's own CPU time may have slowed what it measured."""
FILE_WIDTH = 160
"""Columns of a report that goes to a file or another program, which must not lose figures."""
LATENCY_COLUMNS = ("p50", "p90", "p95", "p99", "p99.9", "mean", "max", "samples")


async def show_progress(counts: LiveCounts, console: Console) -> None:
    """Show the counts until cancelled: a bar on a terminal, a line now and then elsewhere."""
    await (_show_bar(counts, console) if console.is_terminal else _print_lines(counts, console))


async def _show_bar(counts: LiveCounts, console: Console) -> None:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=counts.num_planned)
        rate = _Rate()
        while True:
            num_ended = counts.num_served + counts.num_failed + counts.num_left
            progress.update(task, completed=num_ended, description=_progress_line(counts, rate))
            progress.refresh()
            await asyncio.sleep(REDRAW_INTERVAL_S)


async def _print_lines(counts: LiveCounts, console: Console) -> None:
    rate = _Rate()
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        console.print(_progress_line(counts, rate), highlight=False)


class _Rate:
    """Computes token events a second since the last call."""

    def __init__(self) -> None:
        self._at, self._count = time.perf_counter(), 0

    def update(self, count: int) -> float:
        now = time.perf_counter()
        rate = (count - self._count) / max(now - self._at, 1e-9)
        self._at, self._count = now, count
        return rate


def _progress_line(counts: LiveCounts, rate: _Rate) -> str:
    planned = "" if counts.num_planned is None else f" of {counts.num_planned}"
    failed = f", {counts.num_failed} failed" if counts.num_failed else ""
    return (
        f"{counts.num_served}{planned} served{failed}, {counts.num_in_flight} in flight, "
        f"{rate.update(counts.num_token_events):,.0f} token events/s"
    )


def report_console() -> Console:
    """Return the console for reports."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def print_report(run: Run, console: Console) -> None:
    """Print the report: latencies, throughput, goodput and failures."""
    console.print(f"\n{title_of(run)}", style="bold", markup=False, highlight=False)
    console.print(_latency_table(run.summary))
    console.print("")
    for line in report_lines(run):
        console.print(line, markup=False, highlight=False)


def title_of(run: Run) -> str:
    """Format the model, the server and the pace of a run as one line."""
    pace, target = run.config.pace, run.config.target
    how = f"{pace.concurrency} at a time"
    if pace.request_rate is not None:
        limit = f", at most {pace.concurrency} in flight" if pace.concurrency else ""
        how = f"{pace.request_rate:g} requests/s ({pace.arrival}{limit})"
    if run.config.workload.turns.high > 1:
        how = f"sessions of {run.config.workload.turns} turns, {how}"
    if pace.replay_speed is not None:
        how = f"the trace at {pace.replay_speed:g} times its speed"
    return f"{run.model} at {target.url}, {target.api}, {how}"


def _latency_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    for name in LATENCY_COLUMNS:
        table.add_column(name, justify="right")
    for name, figures in latency_rows(summary):
        table.add_row(name, *figures)
    return table


def latency_rows(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """Yield a row for each latency that was measured: its name, and a text for each of LATENCY_COLUMNS.

    E2E always has one, so that a table says where nothing was served.
    """
    rows = {
        "TTFT": summary.ttft_ms,
        "ITL": summary.itl_ms,
        "TPOT": summary.tpot_ms,
        "E2E": summary.e2e_ms,
        "retrieval": summary.retrieval_ms,
        "client wait": summary.client_wait_ms,
    }
    for name, d in rows.items():
        if not d.num_samples and name != "E2E":
            continue
        figures = (d.p50, d.p90, d.p95, d.p99, d.p99_9, d.mean, d.max)
        yield name, [*("-" if each is None else f"{each:,.2f}" for each in figures), str(d.num_samples)]


def report_lines(run: Run) -> Iterator[str]:
    """Yield lines on throughput, tokens, goodput, failures, and what this client itself took."""
    s = run.summary
    tokens = f"{s.output_tokens_per_s:,.0f} tokens/s, " if s.output_tokens else ""
    yield f"output    {tokens}{s.requests_per_s:,.2f} requests/s in {s.wall_s:.2f} s"
    output = f", {s.output_tokens:,} output{_tokens_per_event(s)}" if s.output_tokens else ""
    yield f"tokens    {s.prompt_tokens:,} prompt ({run.prompt_exactness}){output}"
    if s.goodput_per_s is not None:
        yield f"goodput   {s.goodput_per_s:,.2f} requests/s met {_targets(run.config)}"
    end = ", interrupted" if run.was_interrupted else ""
    yield f"requests  {s.num_served} served, {s.num_failed} failed{_left(s)}{end}"
    for label, failure in s.failures.items():
        yield f"  {label}: {failure.count}, first: {failure.example[:MAX_EXAMPLE_CHARS]}"
    if run.config.workload.tool_use is not None:
        yield f"tools     {s.num_tool_calls} calls, each of a tool that was offered and with valid arguments"
    yield from map(_turn_line, s.turns)
    yield from _server_lines(run)
    cost_us = run.client_cpu_us_per_event
    cost = "" if cost_us is None else f", {cost_us:.1f} us a token event"
    num_processes = run.config.num_processes
    processes = f", {num_processes} processes" if num_processes > 1 else ""
    yield f"client    {run.client_cpu_s:.2f} s of CPU{cost}{processes}"
    if s.wall_s and run.busiest_cpu_s > BUSY_CLIENT * s.wall_s:
        yield (
            f"warning   this client was busy for {run.busiest_cpu_s / s.wall_s:.0%} of the run: it may have been the "
            f"limit, not the server. Use --processes {2 * num_processes}, or a client on another machine"
        )


def _turn_line(figures: TurnFigures) -> str:
    failed = f", {figures.num_failed} failed" if figures.num_failed else ""
    prompt = "" if figures.prompt_tokens is None else f", {figures.prompt_tokens:,.0f} prompt tokens"
    return (
        f"turn {figures.turn:<5}{figures.num_served} served{failed}{prompt}, TTFT p50 {_ms(figures.ttft_ms.p50)} and "
        f"p99 {_ms(figures.ttft_ms.p99)}, E2E p50 {_ms(figures.e2e_ms.p50)}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f} ms"


def _server_lines(run: Run) -> Iterator[str]:
    """Yield the figures of the server's metrics and of the meters, or the reasons why they are missing."""
    server, energy = run.watched.server, run.watched.energy
    if server is not None:
        phases = ", ".join(f"{name} {ms:,.2f} ms" for name, ms in server.phases_ms.items())
        of = f" (means of {server.num_requests} requests, by {server.software}'s metrics)" if phases else ""
        most = max((each.running for each in server.samples), default=0.0)
        queue = max((each.waiting for each in server.samples), default=0.0)
        batch = f", {server.batch:.2f} sequences in a step" if server.batch is not None else ""
        yield f"server    {phases or 'no times of requests'}{of}"
        yield f"          at most {most:g} running and {queue:g} waiting in {len(server.samples)} readings{batch}"
    elif run.watched.missing:
        yield f"server    its metrics are unavailable: {run.watched.missing[:MAX_EXAMPLE_CHARS]}"
    if energy is None:
        return
    if not energy.joules:
        yield f"energy    unavailable: {energy.missing}"
        return
    tokens = run.summary.output_tokens
    each = f", {energy.total_j / tokens:.4g} J an output token" if tokens else ""
    parts = ", ".join(f"{joules:,.1f} J by {name}" for name, joules in energy.joules.items())
    yield f"energy    {parts}{each}{f' (without {energy.missing})' if energy.missing else ''}"


def _left(summary: Summary) -> str:
    return f", {summary.num_left} left early" if summary.num_left else ""


def _tokens_per_event(summary: Summary) -> str:
    if summary.num_counted_by_events:
        return " (token events: the server sent no count)"
    return f", {summary.tokens_per_event:.2f} to an event" if summary.tokens_per_event else ""


def _targets(config: LoadConfig) -> str:
    targets = asdict(config.slo) if config.slo else {}
    return ", ".join(f"{name.removesuffix('_ms')} <= {ms:g} ms" for name, ms in targets.items() if ms is not None)


def to_json(run: Run, argv: Sequence[str]) -> bytes:
    """Encode everything about a run except secrets: config, machine, figures, every request."""
    return encode_document(document_of(run, argv))


def encode_document(document: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=_encode_path), indent=1)


def document_of(run: Run, argv: Sequence[str]) -> dict[str, Any]:
    """Return the document that `to_json` encodes."""
    config = asdict(run.config)
    config["target"]["headers"] = [name for name, _ in run.config.target.headers]
    return {
        "tool": "sluice load",
        "command": shlex.join(["sluice", "load", *shown_command(argv)]),
        "started_at": run.started_at,
        "machine": run.machine,
        "event_loop": run.event_loop,
        "config": config,
        "model": run.model,
        "prompt_exactness": run.prompt_exactness,
        "was_interrupted": run.was_interrupted,
        "client_cpu_s": run.client_cpu_s,
        "client_cpu_us_per_event": run.client_cpu_us_per_event,
        "busiest_cpu_s": run.busiest_cpu_s,
        "server": run.watched.server,
        "server_missing": run.watched.missing,
        "energy": run.watched.energy,
        "summary": run.summary,
        "intervals_ms": {
            name: dict(zip(("p50", "p99"), samples.intervals((50.0, 99.0)), strict=True))
            for name, samples in latency_samples(run.results).items()
        },
        "requests": [_request_row(result) for result in run.results],
    }


def write_csv(run: Run, path: Path) -> None:
    """Write a row for each request, in the order in which they ended."""
    with path.open("w", newline="") as file:
        rows = [_request_row(result) for result in run.results]
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        for row, result in zip(rows, run.results, strict=True):
            writer.writerow({**row, "failure": "" if result.failure is None else result.failure.label})


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def shown_command(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments without the secrets in them."""
    hide_next = False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        is_secret = flag in SECRET_FLAGS
        yield "..." if hide_next else f"{flag}=..." if is_secret and equals else argument
        hide_next = is_secret and not equals


def _request_row(result: RequestResult) -> dict[str, Any]:
    times = result.event_times_s
    return {
        "index": result.planned.index,
        "turn": result.planned.turn,
        "prompt_tokens_asked": result.planned.prompt_tokens,
        "output_tokens_asked": result.planned.output_tokens,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "output_tokens_counted_by": result.output_tokens_counted_by,
        "num_token_events": len(times),
        "intended_s": result.intended_s,
        "client_wait_s": result.client_wait_s,
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        "e2e_s": result.e2e_s,
        "retrieval_s": result.retrieval_s,
        "num_tool_calls": result.num_tool_calls,
        "finish_reason": result.finish_reason,
        "has_left": result.has_left,
        "failure": result.failure,
    }
