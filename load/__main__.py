"""The command `sluice load`. `python -m sluice.load` does the same."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sluice.load.options import parser
from sluice.load.run import INTERRUPTED, reports_errors, run_blocking
from sluice.load.settings import make_config

LONGEST_PROMPT, LARGEST_CROWD = 512, 16
"""The largest that a calibration measures without --prompt-tokens and --concurrency."""


@reports_errors("sluice load")
def command(argv: list[str]) -> int:
    """Measure a streaming LLM server: latencies, throughput, failures."""
    other = _subcommand(argv[0]) if argv else None
    if other is not None:
        return other(argv[1:])
    arguments = parser().parse_args(argv)
    # Imported only after the options are checked, since rich takes long.
    from rich.console import Console

    from sluice.load import report

    if arguments.calibrate is not None:
        return _calibrate(arguments)
    view = partial(report.show_progress, console=Console(stderr=True, soft_wrap=True))
    run = run_blocking(make_config(arguments), None if arguments.quiet else view)
    report.print_report(run, report.report_console())
    if arguments.json is not None:
        arguments.json.write_bytes(report.to_json(run, argv))
    if arguments.csv is not None:
        report.write_csv(run, arguments.csv)
    if arguments.html is not None:
        from sluice.load.page import render_page

        arguments.html.write_text(render_page(run, argv))
    if run.was_interrupted:
        return INTERRUPTED
    return int(run.summary.num_failed > 0 and not arguments.allow_failures)


def _subcommand(name: str) -> Callable[[list[str]], int] | None:
    """Return the command of this name, None for the options of a run. Only what is needed is imported."""
    match name:
        case "compare":
            from sluice.load.compare import compare

            return compare
        case "ab":
            from sluice.load.compare import ab

            return ab
        case "sweep":
            from sluice.load.sweep import sweep

            return sweep
        case "perf-analyzer":
            from sluice.load.perf_analyzer import perf_analyzer

            return perf_analyzer
    return None


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure what the server's steps cost, and write it."""
    from sluice.load.calibrate import calibrate_blocking

    longest = arguments.prompt_tokens.high if arguments.prompt_tokens is not None else LONGEST_PROMPT
    crowd = arguments.concurrency or LARGEST_CROWD
    config = replace(make_config(arguments), metrics_url=None, measures_energy=False)
    found = calibrate_blocking(config, longest, crowd, partial(_report, arguments.quiet))
    arguments.calibrate.write_bytes(found.to_json())
    for name, seconds in found.costs.items():
        sys.stdout.write(f"{name:<16} {seconds * 1e6:12.3f} us\n")
    sys.stdout.write(
        f"{found.num_measurements} measurements; off by {found.median_error:.1%} in the median, "
        f"{found.worst_error:.1%} at most\n"
    )
    return 0


def _report(is_quiet: bool, line: str) -> None:
    if not is_quiet:
        sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
