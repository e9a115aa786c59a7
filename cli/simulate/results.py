"""The figures of a simulated run: a table for people, JSON and CSV for programs."""

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from sluice.engine.simulation.fleet import FleetRun
from sluice.engine.simulation.summary import FleetSummary

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
