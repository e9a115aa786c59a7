"""The report of a run as one HTML file: figures with their intervals and plots, without anything from elsewhere."""

import shlex
from collections.abc import Sequence

import numpy as np

from sluice.load.report import LATENCY_COLUMNS, latency_rows, report_lines, shown_command, title_of
from sluice.load.run import Run
from sluice.load.stream import RequestResult
from sluice.load.summary import ConfidenceInterval, Floats, RequestSamples, latency_samples
from sluice.plots import Line, html_table, line_plot, render_report

_NUM_POINTS = 120
_BLUE, _RED, _GREEN, _YELLOW = "#4477aa", "#cc6677", "#228833", "#b8860b"
_COLORS = {"TTFT": _BLUE, "ITL": _RED, "TPOT": _GREEN, "E2E": _YELLOW}
_INTERVALS = (50.0, 99.0)


def render_page(run: Run, argv: Sequence[str]) -> str:
    """Return the page."""
    samples = latency_samples(run.results)
    lines = (shlex.join(["sluice", "load", *shown_command(argv)]), *report_lines(run))
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    tables = (_latencies(run, samples),)
    return render_report(title_of(run), (*lines, machine), tables, _plots(run, samples))


def _latencies(run: Run, samples: dict[str, RequestSamples]) -> str:
    rows = []
    for label, figures in latency_rows(run.summary):
        found = samples[label].intervals(_INTERVALS) if label in samples else (None, None)
        rows.append((label, *figures, *map(_interval, found)))
    return html_table(rows, ("ms", *LATENCY_COLUMNS, "p50, 95 % sure", "p99, 95 % sure"))


def _interval(interval: ConfidenceInterval | None) -> str:
    return "" if interval is None else f"{interval.low:,.2f} to {interval.high:,.2f}"


def _plots(run: Run, samples: dict[str, RequestSamples]) -> list[str]:
    served = [result for result in run.results if result.is_ok]
    if not served:
        return ["<p>No request was served.</p>"]
    begin_s = min(result.intended_s for result in run.results)
    end_s = max(result.ended_s for result in run.results)
    edges = np.linspace(0.0, max(end_s - begin_s, 1e-9), _NUM_POINTS + 1)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    parts = np.linspace(0.0, 100.0, _NUM_POINTS)
    by_percentile = {
        name: Line(name, _COLORS[name], parts.tolist(), np.percentile(each.values, parts).tolist())
        for name, each in samples.items()
    }
    plots = [
        line_plot(f"{' and '.join(names)} in ms by percentile", lines, "%")
        for names in (("TTFT", "E2E"), ("ITL", "TPOT"))
        if (lines := [by_percentile[name] for name in names if name in by_percentile])
    ]
    events = np.concatenate([np.asarray(result.event_times_s) for result in served]) - begin_s
    rate = _per_second(events, edges)
    plots.append(line_plot("Token events a second", [Line("events", _BLUE, middle, rate)], "s"))
    sent = np.array([result.started_s for result in run.results]) - begin_s
    ended = np.array([result.ended_s for result in run.results]) - begin_s
    in_flight = np.cumsum(np.histogram(sent, edges)[0] - np.histogram(ended, edges)[0])
    plots.append(line_plot("Requests in flight", [Line("in flight", _BLUE, middle, in_flight.tolist())], "s"))
    rates = [
        Line("sent", _BLUE, middle, _per_second(sent, edges)),
        Line("ended", _RED, middle, _per_second(ended, edges)),
    ]
    plots.append(line_plot("Requests a second", rates, "s"))
    plots.append(line_plot("TTFT in ms by the time of the intended send", [_ttft_by_time(served, begin_s)], "s"))
    plots += _server_plots(run, begin_s)
    return plots


def _server_plots(run: Run, begin_s: float) -> list[str]:
    """Plot the requests in the server over time, by its metrics, and the TTFT by the number of the turn."""
    plots = []
    samples = run.watched.server.samples if run.watched.server is not None else ()
    if len(samples) > 1:
        times = [max(0.0, each.at_s - begin_s) for each in samples]
        lines = [
            Line("running", _BLUE, times, [each.running for each in samples]),
            Line("waiting", _RED, times, [each.waiting for each in samples]),
        ]
        plots.append(line_plot("Sequences in the server (its batch and its queue)", lines, "s"))
    known = [each for each in run.summary.turns if each.ttft_ms.p50 is not None]
    if len(known) > 1:
        turns = [float(each.turn) for each in known]
        lines = [
            Line("p50", _BLUE, turns, [each.ttft_ms.p50 or 0.0 for each in known]),
            Line("p99", _RED, turns, [each.ttft_ms.p99 or 0.0 for each in known]),
        ]
        plots.append(line_plot("TTFT in ms by the number of the turn", lines, "turn"))
    return plots


def _per_second(moments: Floats, edges: Floats) -> list[float]:
    counts = np.histogram(moments, edges)[0] / (edges[1] - edges[0])
    return [float(count) for count in counts]


def _ttft_by_time(served: list[RequestResult], begin_s: float) -> Line:
    points = sorted((result.intended_s - begin_s, (result.ttft_s or 0.0) * 1e3) for result in served)
    return Line("TTFT", _BLUE, [at for at, _ in points], [ms for _, ms in points])
