"""The progress of a run, and its report: a table for people, JSON for programs."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from sluice.load.chaos.outcomes import Outcome
from sluice.load.chaos.run import ChaosRun
from sluice.load.single_run import read_machine_info

_REDRAW_S, _LINE_S = 1.0, 10.0
_MOST_SLOPES = 5
"""The processes whose memory grew fastest."""


async def show_progress(run: ChaosRun, console: Console) -> None:
    """Show the progress of the run until cancelled: a table on a terminal, a line now and then elsewhere. A request
    that breaks a promise is told at once."""
    telling = asyncio.create_task(_tell_broken(run, console))
    try:
        if not console.is_terminal:
            while True:
                console.print(progress_line(run), highlight=False, markup=False)
                await asyncio.sleep(_LINE_S)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(_progress_table(run), refresh=True)
                await asyncio.sleep(_REDRAW_S)
    finally:
        telling.cancel()


async def _tell_broken(run: ChaosRun, console: Console) -> None:
    num_told = 0
    while True:
        broken = [] if run.traffic is None else run.traffic.tally.broken[num_told:]
        for each in broken:
            console.print(each, style="red", highlight=False, markup=False)
        num_told += len(broken)
        await asyncio.sleep(_REDRAW_S)


def progress_line(run: ChaosRun) -> str:
    """Format the run's progress as one line."""
    elapsed_s = time.time() - run.begun_at
    ended = 0 if run.traffic is None else run.traffic.tally.num_ended
    counts = "" if run.traffic is None else ", ".join(f"{count} {name}" for name, count in outcome_counts(run))
    faults = f"; {sum(run.num_faults.values())} faults" if run.num_faults else ""
    now = f", now {' '.join(run.current_faults)}" if run.current_faults else ""
    rate = f" ({ended / elapsed_s:.1f}/s)" if ended else ""
    return f"{elapsed_s:5.0f} s  {run.phase}: {counts or 'no requests yet'}{rate}{faults}{now}"


def outcome_counts(run: ChaosRun) -> Iterator[tuple[str, int]]:
    """Yield each outcome with its number of requests; without those of none but for what counts as lost."""
    if run.traffic is None:
        return
    for outcome in Outcome:
        count = run.traffic.tally.total(outcome)
        if count or outcome is Outcome.LOST:
            yield str(outcome), count


def _progress_table(run: ChaosRun) -> Table:
    table = Table(title=progress_line(run), box=None, title_justify="left")
    table.add_column("kind", no_wrap=True)
    for outcome in Outcome:
        table.add_column(outcome.name.lower(), justify="right", no_wrap=True)
    for kind, counts in kind_rows(run):
        table.add_row(kind, *(str(counts.get(outcome) or "-") for outcome in Outcome))
    return table


def kind_rows(run: ChaosRun) -> Iterator[tuple[str, dict[Outcome, int]]]:
    """Yield each kind of request with its outcomes."""
    if run.traffic is None:
        return
    counts = run.traffic.tally.counts
    for kind in dict.fromkeys(kind for kind, _ in counts):
        yield kind, {outcome: count for (of, outcome), count in counts.items() if of == kind}


def print_report(run: ChaosRun, console: Console) -> None:
    """Print the clients' outcomes, the faults, the checks, and the broken promises."""
    console.print(_progress_table(run))
    for name, count in sorted(run.num_faults.items()):
        console.print(f"  {count:4} x {name}", highlight=False, markup=False)
    for part, reason in run.skipped.items():
        console.print(f"without {part}: {reason}", highlight=False, markup=False)
    console.print(_sizes_table(run))
    for slope in run.slopes[:_MOST_SLOPES]:
        said = f"{slope.mb_per_hour:+.1f} MB an hour over {slope.minutes:.0f} minutes"
        console.print(f"  {slope.part} (pid {slope.pid}): {said}", highlight=False, markup=False)
    for what, said in run.checks.items():
        console.print(f"{what}: {said}", highlight=False, markup=False)
    if run.traffic is not None:
        for (outcome, label), count in run.traffic.tally.labels.most_common():
            console.print(f"  {count:6} {outcome}: {label}", highlight=False, markup=False)
    for violation in run.violations:
        console.print(f"BROKEN: {violation}", style="red", highlight=False, markup=False)
    console.print(f"{verdict(run)} (seed {run.config.seed})", style="bold", highlight=False, markup=False)


def verdict(run: ChaosRun) -> str:
    """Return the verdict of the run as one line."""
    if run.violations:
        return f"broken promises: {len(run.violations)}; see {run.config.folder}"
    if not run.is_complete:
        return "no promise broken so far; the run did not come to its end, where growth, blocks and ledgers are checked"
    return "no promise broken"


def _sizes_table(run: ChaosRun) -> Table:
    table = Table(box=None)
    for name in ("part", "MB", "then", "threads", "then", "descriptors", "then"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    for part, before in run.before.items():
        after = run.after.get(part)
        cells = [] if after is None else [f"{after.rss_mb:.0f}", str(after.threads), str(after.descriptors)]
        first = [f"{before.rss_mb:.0f}", str(before.threads), str(before.descriptors)]
        pairs = zip(first, cells or ["-"] * len(first), strict=True)
        table.add_row(part, *(cell for pair in pairs for cell in pair))
    return table


def to_json(run: ChaosRun) -> bytes:
    """Return the report for programs."""
    tally = None if run.traffic is None else run.traffic.tally
    document: dict[str, Any] = {
        "seed": run.config.seed,
        "minutes": run.config.minutes,
        "clients": run.config.num_clients,
        "light_clients": run.config.num_light,
        "gap_s": run.config.mean_gap_s,
        "machine": read_machine_info(),
        "requests": dict(outcome_counts(run)),
        "kinds": {kind: {str(o): n for o, n in counts.items()} for kind, counts in kind_rows(run)},
        "output_tokens": 0 if tally is None else tally.num_output_tokens,
        "ends": [] if tally is None else [[*key, count] for key, count in tally.labels.most_common()],
        "examples": {} if tally is None else {key: list(each) for key, each in tally.examples.items()},
        "faults": run.num_faults,
        "skipped": run.skipped,
        "checks": run.checks,
        "sizes_before": {part: asdict(size) for part, size in run.before.items()},
        "sizes_after": {part: asdict(size) for part, size in run.after.items()},
        "samples": [asdict(sample) for sample in run.samples],
        "slopes": [asdict(slope) for slope in run.slopes],
        "trace": run.trace,
        "violations": run.violations,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
