"""The progress of a run, and its report: a table for people, JSON for programs."""

import asyncio
import csv
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from load.config import LoadConfig
from load.intervals import latency_samples
from load.run import Run
from load.stream import LiveCounts, RequestResult
from load.summary import Summary

SECRET_FLAGS = ("--api-key", "--header")
MAX_EXAMPLE_CHARS = 160
REDRAW_INTERVAL_S = 0.5
"""Seconds between two drawings, which cost CPU that a server on the same machine could use."""
LINE_INTERVAL_S = 5.0
BUSY_CLIENT = 0.8
"""The share of the run from which on the client's own CPU time may have slowed what it measured."""
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


def print_report(run: Run, console: Console) -> None:
    """Print the report: latencies, throughput, goodput and failures."""
    console.print(f"\n{title_of(run)}", style="bold", markup=False, highlight=False)
    console.print(_latency_table(run.summary))
    console.print("")
    for line in report_lines(run):
        console.print(line, markup=False, highlight=False)


def title_of(run: Run) -> str:
    """Say in a line what was measured, and how."""
    pace, target = run.config.pace, run.config.target
    how = f"{pace.concurrency} at a time"
    if pace.request_rate is not None:
        limit = f", at most {pace.concurrency} in flight" if pace.concurrency else ""
        how = f"{pace.request_rate:g} requests/s ({pace.arrival}{limit})"
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
    cost_us = run.client_cpu_us_per_event
    cost = "" if cost_us is None else f", {cost_us:.1f} us a token event"
    yield f"client    {run.client_cpu_s:.2f} s of CPU{cost}"
    if s.wall_s and run.client_cpu_s > BUSY_CLIENT * s.wall_s:
        yield (
            f"warning   this client was busy for {run.client_cpu_s / s.wall_s:.0%} of the run: it may have been the "
            "limit, not the server. Run several clients, or one on another machine"
        )


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
    config = asdict(run.config)
    config["target"]["headers"] = [name for name, _ in run.config.target.headers]
    document = {
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
        "summary": run.summary,
        "intervals_ms": {
            name: dict(zip(("p50", "p99"), samples.intervals((50.0, 99.0)), strict=True))
            for name, samples in latency_samples(run.results).items()
        },
        "requests": [_request_row(result) for result in run.results],
    }
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=_encode_path), indent=1)


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
        "finish_reason": result.finish_reason,
        "has_left": result.has_left,
        "failure": result.failure,
    }
