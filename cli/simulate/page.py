"""The report of a simulated run as one HTML file: figures and plots, without anything from elsewhere."""

import shlex
from collections.abc import Sequence

import numpy as np

from sluice.engine.simulation.fleet import FleetRun, Floats
from sluice.engine.simulation.summary import FleetSummary
from sluice.plots import Line, bar_plot, line_plot, render_report, table_row

NUM_POINTS = 120


def render_page(run: FleetRun, summary: FleetSummary, argv: Sequence[str]) -> str:
    """Return the page."""
    s, title = summary, f"{summary.num_replicas} replicas, router {summary.router}"
    command = shlex.join(["sluice", "simulate", *argv])
    model = " on ".join(part for part in (run.config.profile.name, run.config.profile.machine) if part)
    rows = [
        table_row("output", f"{s.output_tokens_per_s:,.0f} tokens/s"),
        table_row("requests", f"{s.requests_per_s:,.2f} a second"),
        table_row("prompt tokens from caches", f"{s.hit_rate:.1%}"),
        table_row("of one infinite cache", f"{s.infinite_hit_rate:.1%}"),
        table_row("busy", f"{s.utilization:.1%}"),
    ]
    if s.goodput_per_s is not None:
        rows.append(table_row("goodput", f"{s.goodput_per_s:,.2f} requests/s ({s.share_in_target:.2%})"))
    if s.num_rejected:
        rows.append(table_row("can never fit", f"{s.num_rejected:,} requests"))
    return render_report(title, (command, model), (_latencies(s), f"<table>{''.join(rows)}</table>"), _plots(run))


def _latencies(summary: FleetSummary) -> str:
    names = ("p50", "p90", "p95", "p99", "mean", "max")
    rows = ["<tr><th>ms</th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for label, figures in (("TTFT", summary.ttft_s), ("ITL", summary.itl_s), ("E2E", summary.e2e_s)):
        values = (getattr(figures, name) for name in names)
        cells = "".join(f"<td>{'-' if value is None else f'{value * 1e3:,.1f}'}</td>" for value in values)
        rows.append(f"<tr><td>{label}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _plots(run: FleetRun) -> list[str]:
    served = run.replica >= 0
    at_s = np.array([request.at_s for request in run.requests])[served]
    ttft_ms, e2e_ms = run.ttft_s[served] * 1e3, run.e2e_s[served] * 1e3
    if not at_s.size:
        return ["<p>No request was served.</p>"]

    def line(label: str, color: str, x: Floats, y: Floats) -> Line:
        return Line(label, color, x.tolist(), y.tolist())

    parts = np.linspace(0.0, 1.0, NUM_POINTS)
    quantiles = [
        line("TTFT", "#4477aa", parts * 100, np.quantile(ttft_ms, parts)),
        line("E2E", "#cc6677", parts * 100, np.quantile(e2e_ms, parts)),
    ]
    edges = np.linspace(0.0, max(run.end_s, 1e-9), NUM_POINTS + 1)
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
