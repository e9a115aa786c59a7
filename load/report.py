"""A run as a table for people and as JSON for everything else."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from load.config import LoadConfig
from load.run import Run
from load.stream import RequestResult
from load.summary import Distribution, Summary

SECRET_FLAGS = ("--api-key", "--header")
MAX_EXAMPLE_CHARS = 160


def print_report(run: Run, console: Console) -> None:
    """The whole of what a person wants to see."""
    console.print(_title(run), style="bold", markup=False, highlight=False)
    console.print(_latency_table(run.summary))
    for line in _lines(run):
        console.print(line, markup=False, highlight=False)


def _title(run: Run) -> str:
    pace, target = run.config.pace, run.config.target
    how = f"{pace.concurrency} at a time"
    if pace.request_rate is not None:
        limit = f", at most {pace.concurrency} in flight" if pace.concurrency else ""
        how = f"{pace.request_rate:g} requests/s ({pace.arrival}{limit})"
    return f"\n{run.model} at {target.url}, {target.api}, {how}"


def _latency_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    for name in ("p50", "p90", "p99", "mean", "max", "samples"):
        table.add_column(name, justify="right")
    rows = {
        "TTFT": summary.ttft_ms,
        "ITL": summary.itl_ms,
        "TPOT": summary.tpot_ms,
        "E2E": summary.e2e_ms,
        "client wait": summary.client_wait_ms,
    }
    for name, distribution in rows.items():
        table.add_row(name, *_cells(distribution))
    return table


def _cells(d: Distribution) -> list[str]:
    figures = [_figure(value) for value in (d.p50, d.p90, d.p99, d.mean, d.max)]
    return [*figures, str(d.num_samples)]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _lines(run: Run) -> Iterator[str]:
    s = run.summary
    yield ""
    yield f"output    {s.output_tokens_per_s:,.0f} tokens/s, {s.requests_per_s:,.2f} requests/s in {s.wall_s:.2f} s"
    yield f"tokens    {s.prompt_tokens:,} prompt ({run.prompt_exactness}), {s.output_tokens:,} output{_merging(s)}"
    if s.goodput_per_s is not None:
        yield f"goodput   {s.goodput_per_s:,.2f} requests/s met {_targets(run.config)}"
    yield f"requests  {s.num_served} served, {s.num_failed} failed{', interrupted' if run.was_interrupted else ''}"
    for label, failure in s.failures.items():
        yield f"  {label}: {failure.count}, first: {failure.example[:MAX_EXAMPLE_CHARS]}"
    yield f"client    {run.client_cpu_s:.2f} s of CPU{_cost(run)}"


def _merging(summary: Summary) -> str:
    if summary.num_counted_by_events:
        return " (token events: the server sent no count)"
    return f", {summary.tokens_per_event:.2f} to an event" if summary.tokens_per_event else ""


def _cost(run: Run) -> str:
    return "" if run.client_cpu_us_per_event is None else f", {run.client_cpu_us_per_event:.1f} us a token event"


def _targets(config: LoadConfig) -> str:
    targets = asdict(config.slo) if config.slo else {}
    return ", ".join(f"{name.removesuffix('_ms')} <= {ms:g} ms" for name, ms in targets.items() if ms is not None)


def to_json(run: Run, argv: Sequence[str]) -> bytes:
    """Everything about a run, secrets left out: config, machine, figures, every request."""
    document = {
        "tool": "sluice load",
        "command": shlex.join(["sluice", "load", *_without_secrets(argv)]),
        "started_at": run.started_at,
        "machine": run.machine,
        "event_loop": run.event_loop,
        "config": _config_without_secrets(run.config),
        "model": run.model,
        "prompt_exactness": run.prompt_exactness,
        "was_interrupted": run.was_interrupted,
        "client_cpu_s": run.client_cpu_s,
        "client_cpu_us_per_event": run.client_cpu_us_per_event,
        "summary": run.summary,
        "requests": [_request_row(result) for result in run.results],
    }
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=_encode_path), indent=1)


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _config_without_secrets(config: LoadConfig) -> dict[str, Any]:
    plain = asdict(config)
    plain["target"]["headers"] = [name for name, _ in config.target.headers]
    return plain


def _without_secrets(argv: Sequence[str]) -> Iterator[str]:
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
        "failure": result.failure,
    }
