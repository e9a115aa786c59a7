"""Plots for reports that are one HTML file: SVG, without scripts and without anything from elsewhere."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT, _MARGIN = 640, 240, 48
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
text { font-size: 12px; fill: currentColor; } .grid { stroke: currentColor; stroke-opacity: 0.15; }
.line { fill: none; stroke-width: 2; } .bar { fill: #4477aa; } .front { stroke-dasharray: 4 3; }
table { border-collapse: collapse; } th, td { padding: 0.15rem 0.9rem 0.15rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } code { overflow-wrap: anywhere; }
"""


class Line(NamedTuple):
    """A line of a plot."""

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str] = ()
    """A text for each point; empty where points are not marked."""


class Points(NamedTuple):
    """A group of points of a plot. `texts` are shown when the mouse is over them."""

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    texts: Sequence[str]
    radius: float = 3.5


def render_report(title: str, lines: Sequence[str], tables: Sequence[str], plots: Sequence[str]) -> str:
    """Return the page: title, a command and other `lines` of text, then tables and plots, which are HTML already."""
    texts = "\n".join(f"<p><code>{html.escape(line)}</code></p>" for line in lines if line)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>
{texts}
{"".join(tables)}
<main>
{"".join(plots)}
</main></body></html>
"""


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table of texts, which are escaped."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{heads and f'<tr>{heads}</tr>'}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def line_plot(title: str, lines: Sequence[Line], unit: str) -> str:
    """Return a figure of lines over one axis from 0 to the largest `x`, whose unit is `unit`."""
    most_x = max(max(line.x) for line in lines) or 1.0
    most_y = _round_up(max(max(line.y) for line in lines))
    marks, labels = [], []
    for place, line in enumerate(lines):
        spots = [
            (f"{_MARGIN + x / most_x * (_WIDTH - _MARGIN):.1f}", f"{_HEIGHT - y / most_y * (_HEIGHT - 20):.1f}")
            for x, y in zip(line.x, line.y, strict=True)
        ]
        points = " ".join(map(",".join, spots))
        marks.append(f'<polyline class="line" stroke="{line.color}" points="{points}"/>')
        for (x, y), name in zip(spots, line.names, strict=False):
            marks.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{line.color}"/>')
            marks.append(f'<text x="{x}" y="{y}" dx="-6" dy="-8" text-anchor="end">{html.escape(name)}</text>')
        spot = f'x="{_WIDTH - 90}" y="{34 + 16 * place}" style="fill: {line.color}"'
        labels.append(f"<text {spot}>{html.escape(line.label)}</text>")
    ends = f'<text x="{_MARGIN}" y="{_HEIGHT + 16}">0</text>'
    ends += f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{most_x:,.4g} {unit}</text>'
    return _figure(title, most_y, "".join(marks + labels) + ends)


def point_plot(title: str, groups: Sequence[Points], front: Line, unit: str) -> str:
    """Return a figure of points over a logarithmic axis, whose unit is `unit`, with a line through the best of them.
    No `x` is 0 or less."""
    low, high = _log_ends([x for group in groups for x in group.x])
    most_y = _round_up(max(y for group in groups for y in group.y))

    def place(x: float, y: float) -> tuple[float, float]:
        part = (math.log(x) - low) / (high - low)
        return _MARGIN + 8 + part * (_WIDTH - _MARGIN - 16), _HEIGHT - y / most_y * (_HEIGHT - 20)

    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, front.x, front.y))
    marks = [f'<polyline class="line front" stroke="{front.color}" points="{corners}"/>']
    labels = []
    for number, group in enumerate(groups):
        for x, y, text in zip(group.x, group.y, group.texts, strict=True):
            spot = f'cx="{place(x, y)[0]:.1f}" cy="{place(x, y)[1]:.1f}" r="{group.radius:g}"'
            marks.append(f'<circle {spot} fill="{group.color}"><title>{html.escape(text)}</title></circle>')
        spot = f'x="{_MARGIN + 12}" y="{34 + 16 * number}" style="fill: {group.color}"'
        labels.append(f"<text {spot}>{html.escape(group.label)}</text>")
    ends = f'<text x="{_MARGIN}" y="{_HEIGHT + 16}">{math.exp(low):,.4g} {unit}</text>'
    ends += f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{math.exp(high):,.4g} {unit} (log)</text>'
    return _figure(title, most_y, "".join(marks + labels) + ends)


def _log_ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms of the ends of an axis that has all values, and is not empty."""
    low, high = math.log(min(values)), math.log(max(values))
    return (low, high) if high - low > 1e-6 else (low - 0.5, high + 0.5)


def bar_plot(title: str, values: Sequence[float]) -> str:
    """Return a figure with a bar for each value, from 0."""
    most = _round_up(max(values))
    step = (_WIDTH - _MARGIN) / len(values)
    bars = []
    for place, value in enumerate(values):
        height = value / most * (_HEIGHT - 20)
        spot = f'x="{_MARGIN + place * step + step * 0.1:.1f}" y="{_HEIGHT - height:.1f}"'
        bars.append(
            f'<rect class="bar" {spot} width="{step * 0.8:.1f}" height="{height:.1f}">'
            f"<title>{place}: {value:,.4g}</title></rect>"
        )
    ends = f'<text x="{_MARGIN}" y="{_HEIGHT + 16}">0</text>'
    ends += f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{len(values) - 1}</text>'
    return _figure(title, most, "".join(bars) + ends)


def _figure(title: str, most_y: float, content: str) -> str:
    """Return a figure with a grid of four lines; the topmost stands for `most_y`."""
    grid = []
    for part in range(5):
        y = _HEIGHT - part / 4 * (_HEIGHT - 20)
        grid.append(f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{most_y * part / 4:,.4g}"
        grid.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 24}" role="img" aria-label="{html.escape(title)}">'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}{''.join(grid)}{content}</svg></figure>"


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 5 or 10 times a power of ten."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 10) if step * power >= value * (1 - 1e-12))
