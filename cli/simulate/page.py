"""The report of a simulated run as one HTML file: figures and plots, without anything from elsewhere."""

import html
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.simulation.fleet import FleetRun, Floats
from engine.simulation.summary import FleetSummary

WIDTH, HEIGHT, MARGIN = 640, 240, 48
NUM_POINTS = 120
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
text { font-size: 12px; fill: currentColor; } .grid { stroke: currentColor; stroke-opacity: 0.15; }
.line { fill: none; stroke-width: 2; } .bar { fill: #4477aa; }
table { border-collapse: collapse; } th, td { padding: 0.15rem 0.9rem 0.15rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } code { overflow-wrap: anywhere; }
"""


class Line(NamedTuple):
    """One line of a plot."""

    label: str
    color: str
    x: Floats
    y: Floats


def render_page(run: FleetRun, summary: FleetSummary, argv: Sequence[str]) -> str:
    """Return the page."""
    s, title = summary, f"{summary.num_replicas} replicas, router {summary.router}"
    plots = "\n".join(_plots(run))
    command = html.escape(shlex.join(["sluice", "simulate", *argv]))
    model = html.escape(" on ".join(part for part in (run.config.profile.name, run.config.profile.machine) if part))
    goodput = (
        ""
        if s.goodput_per_s is None
        else _row("goodput", f"{s.goodput_per_s:,.2f} requests/s ({s.share_in_target:.2%})")
    )
    rejected = _row("can never fit", f"{s.num_rejected:,} requests") if s.num_rejected else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{html.escape(title)}</h1><p><code>{command}</code></p><p>{model}</p>
{_latencies(s)}
<table>{_row("output", f"{s.output_tokens_per_s:,.0f} tokens/s")}{_row("requests", f"{s.requests_per_s:,.2f} a second")}
{_row("prompt tokens from caches", f"{s.hit_rate:.1%}")}{_row("of one infinite cache", f"{s.infinite_hit_rate:.1%}")}
{_row("busy", f"{s.utilization:.1%}")}{goodput}{rejected}</table>
<main>
{plots}
</main></body></html>
"""


def _row(name: str, value: str) -> str:
    return f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"


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
    parts = np.linspace(0.0, 1.0, NUM_POINTS)
    quantiles = [
        Line("TTFT", "#4477aa", parts * 100, np.quantile(ttft_ms, parts)),
        Line("E2E", "#cc6677", parts * 100, np.quantile(e2e_ms, parts)),
    ]
    edges = np.linspace(0.0, max(run.end_s, 1e-9), NUM_POINTS + 1)
    width_s = edges[1] - edges[0]
    middle = (edges[1:] + edges[:-1]) / 2
    starts, ends = at_s, at_s + run.e2e_s[served]
    came, gone = np.histogram(starts, edges)[0], np.histogram(ends, edges)[0]
    rates = [
        Line("come", "#4477aa", middle, came / width_s),
        Line("end", "#cc6677", middle, gone / width_s),
    ]
    in_flight = [Line("in flight", "#4477aa", middle, np.cumsum(came - gone).astype(float))]
    slow = [Line("TTFT p99", "#4477aa", middle, _p99_of_bins(starts, ttft_ms, edges))]
    return [
        _line_plot("Latency in ms by percentile", quantiles, "%"),
        _line_plot("Requests a second", rates, "s"),
        _line_plot("Requests in flight", in_flight, "s"),
        _line_plot("99th percentile of TTFT in ms, by time of arrival", slow, "s"),
        _bar_plot("Requests of each replica", [each.num_requests for each in run.totals]),
        _bar_plot("Seconds in which each replica was busy", [each.busy_s for each in run.totals]),
    ]


def _p99_of_bins(at_s: Floats, values: Floats, edges: Floats) -> Floats:
    """Return the 99th percentile of the values in each bin, 0 for an empty one."""
    place = np.digitize(at_s, edges) - 1
    order = np.argsort(place, kind="stable")
    sizes = np.bincount(np.clip(place, 0, len(edges) - 2), minlength=len(edges) - 1)
    pieces = np.split(values[order], np.cumsum(sizes)[:-1])
    return np.array([np.percentile(piece, 99) if piece.size else 0.0 for piece in pieces])


def _line_plot(title: str, lines: Sequence[Line], unit: str) -> str:
    most_x = max(float(line.x[-1]) for line in lines) or 1.0
    most_y = _round_up(max(float(line.y.max()) for line in lines))
    marks, labels = [], []
    for place, line in enumerate(lines):
        points = " ".join(
            f"{MARGIN + x / most_x * (WIDTH - MARGIN):.1f},{HEIGHT - y / most_y * (HEIGHT - 20):.1f}"
            for x, y in zip(line.x, line.y, strict=True)
        )
        marks.append(f'<polyline class="line" stroke="{line.color}" points="{points}"/>')
        spot = f'x="{WIDTH - 90}" y="{34 + 16 * place}" style="fill: {line.color}"'
        labels.append(f"<text {spot}>{html.escape(line.label)}</text>")
    ends = f'<text x="{MARGIN}" y="{HEIGHT + 16}">0</text>'
    ends += f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{most_x:,.4g} {unit}</text>'
    return _figure(title, most_y, "".join(marks + labels) + ends)


def _bar_plot(title: str, values: Sequence[float]) -> str:
    most = _round_up(max(values))
    step = (WIDTH - MARGIN) / len(values)
    bars = []
    for place, value in enumerate(values):
        height = value / most * (HEIGHT - 20)
        spot = f'x="{MARGIN + place * step + step * 0.1:.1f}" y="{HEIGHT - height:.1f}"'
        bars.append(
            f'<rect class="bar" {spot} width="{step * 0.8:.1f}" height="{height:.1f}">'
            f"<title>{place}: {value:,.4g}</title></rect>"
        )
    ends = f'<text x="{MARGIN}" y="{HEIGHT + 16}">0</text>'
    ends += f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{len(values) - 1}</text>'
    return _figure(title, most, "".join(bars) + ends)


def _figure(title: str, most_y: float, content: str) -> str:
    """Return a figure with a grid of four lines; the topmost stands for `most_y`."""
    grid = []
    for part in range(5):
        y = HEIGHT - part / 4 * (HEIGHT - 20)
        grid.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{most_y * part / 4:,.4g}"
        grid.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 24}" role="img" aria-label="{html.escape(title)}">'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}{''.join(grid)}{content}</svg></figure>"


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 5 or 10 times a power of ten."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1, 2, 4, 5, 10) if step * power >= value * (1 - 1e-12)))
